"""TorchServe's GRPCInferenceService: KServe's protocol in TorchServe's package."""

from __future__ import annotations

import grpc
import pytest

from inference.dialects.torchserve.grpc_open_inference import SERVICE
from inference.dialects.torchserve.protocol import open_inference_pb2 as pb
from tests.unit.scripts import says


async def ask(server, method: str, request: object) -> object:
    answer = getattr(pb, type(request).__name__.replace("Request", "Response"))
    call = server.channel.unary_unary(f"/{SERVICE}/{method}", lambda m: m.SerializeToString(), answer.FromString)
    return await call(request, timeout=10, metadata=server.metadata)


def asks(text: bytes = b"The capital", model: str = "demo", version: str = "") -> pb.ModelInferRequest:
    request = pb.ModelInferRequest(model_name=model, model_version=version, id="a")
    request.parameters["max_tokens"].int64_param = 9
    request.inputs.add(name="text_input", datatype="BYTES", shape=[1]).contents.bytes_contents.append(text)
    request.inputs.add(name="temperature", datatype="FP32", shape=[1]).contents.fp32_contents.append(0.0)
    return request


async def refused(server, method: str, request: object) -> tuple[str, str]:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await ask(server, method, request)
    return caught.value.code().name, caught.value.details()


async def test_what_it_tells(server):
    assert (await ask(server, "ServerLive", pb.ServerLiveRequest())).live
    assert (await ask(server, "ServerReady", pb.ServerReadyRequest())).ready
    assert (await ask(server, "ModelReady", pb.ModelReadyRequest(name="demo"))).ready
    assert (await ask(server, "ModelReady", pb.ModelReadyRequest(name="demo", version="1.0"))).ready
    told = await ask(server, "ModelMetadata", pb.ModelMetadataRequest(name="demo"))
    assert (told.name, told.versions, told.platform, list(told.inputs)) == ("demo", ["1.0"], "", [])


async def test_inference(server):
    server.worker.scripts.append(says(" Rome."))
    answer = await ask(server, "ModelInfer", asks(version="1.0"))
    assert (answer.model_name, answer.model_version, answer.id) == ("demo", "1.0", "a")
    (output,) = answer.outputs
    assert (output.name, output.datatype, output.shape, output.contents.bytes_contents) == (
        "text_output",
        "BYTES",
        [1],
        [b" Rome."],
    )
    (submit,) = server.worker.submits
    assert (submit.params.max_tokens, submit.params.temperature) == (9, 0.0)


async def test_tokens_and_named_outputs(server):
    server.worker.scripts.append(says(" Rome."))
    request = asks()
    request.inputs[0].CopyFrom(pb.ModelInferRequest.InferInputTensor(name="input0", datatype="UINT32", shape=[2]))
    request.inputs[0].contents.uint_contents.extend([293, 341])
    request.outputs.add(name="output0")
    (output,) = (await ask(server, "ModelInfer", request)).outputs
    assert (output.name, list(output.contents.uint_contents)) == ("output0", [1540, 16, 2])


async def test_nothing_is_binary(server):
    server.worker.scripts.append(says(" Rome."))
    request = asks()
    request.parameters["binary_data_output"].bool_param = True
    request.inputs[0].parameters["binary_data_size"].int64_param = 5
    request.outputs.add(name="text_output").parameters["binary_data"].bool_param = True
    (output,) = (await ask(server, "ModelInfer", request)).outputs
    assert output.contents.bytes_contents == [b" Rome."]


@pytest.mark.parametrize(("method", "request_", "code", "words"), [
    ("ModelReady", pb.ModelReadyRequest(), "INTERNAL", "Parameter name is required.\nBadRequestException.()"),
    ("ModelReady", pb.ModelReadyRequest(name="none"), "NOT_FOUND", "Model not found: none\n"),
    ("ModelReady", pb.ModelReadyRequest(name="demo", version="9"), "NOT_FOUND", "Model version: 9 does not exist"),
    ("ModelMetadata", pb.ModelMetadataRequest(), "INTERNAL", "Parameter model_name is required.\n"),
    ("ModelMetadata", pb.ModelMetadataRequest(name="none"), "NOT_FOUND", "Model not found: none\n"),
    ("ModelInfer", asks(model=""), "INTERNAL", "Parameter model_name is required.\nBadRequestException.()"),
    ("ModelInfer", asks(model="none"), "INTERNAL", "Model not found: none\n"),
    ("ModelInfer", asks(b"\xff"), "INVALID_ARGUMENT", "not valid UTF-8"),
    ("ModelInfer", pb.ModelInferRequest(model_name="demo"), "INVALID_ARGUMENT", "inputs must be a non-empty list"),
    ("ModelInfer", pb.ModelInferRequest(model_name="demo", raw_input_contents=[b"x"]), "INVALID_ARGUMENT", "raw_input_contents"),
    ("ModelInfer", pb.ModelInferRequest(model_name="demo", inputs=[
        pb.ModelInferRequest.InferInputTensor(name="x", datatype="FP16")]), "INVALID_ARGUMENT", "unsupported datatype 'FP16'"),
])  # fmt: skip
async def test_refused(server, method, request_, code, words):
    found, text = await refused(server, method, request_)
    assert (found, words in text) == (code, True), text


async def test_what_torchserve_does_not_implement(server):
    assert (await refused(server, "ServerMetadata", pb.ServerMetadataRequest()))[0] == "UNIMPLEMENTED"
