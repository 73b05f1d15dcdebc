"""Triton's gRPC service over a Unix socket, with a fake worker behind it."""

from __future__ import annotations

import asyncio
import math
from contextlib import asynccontextmanager

import grpc
import pytest

from engine.failures import Failure, FailureCode, FinishReason
from inference.dialects.triton.grpc_service import GrpcInferenceService
from inference.dialects.triton.protocol import grpc_service_pb2 as pb
from inference.server.grpc_calls import Timeouts
from tests.unit.scripts import Gate, Script, ids, says
from tests.unit.serving import Serving, eventually, fake_workers

SERVICE = "/inference.GRPCInferenceService/"


class Client:
    """Calls by name."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self.channel = channel

    async def ask(self, method: str, request: object, answer: object, **metadata: str) -> object:
        call = self.channel.unary_unary(SERVICE + method, lambda m: m.SerializeToString(), answer.FromString)
        return await call(request, metadata=tuple(metadata.items()), timeout=10)

    async def stream(self, *requests: object) -> list[object]:
        return await self.flow(iter(requests))

    async def flow(self, requests: object) -> list[object]:
        call = self.channel.stream_stream(
            SERVICE + "ModelStreamInfer", lambda m: m.SerializeToString(), pb.ModelStreamInferResponse.FromString
        )(requests, timeout=10)
        return [answer async for answer in call]


@asynccontextmanager
async def served(serving, sockets):
    server = grpc.aio.server()
    server.add_generic_rpc_handlers([GrpcInferenceService(serving.services, Timeouts(5, 5)).handler()])
    server.add_insecure_port(f"unix:{sockets}/grpc.sock")
    await server.start()
    async with grpc.aio.insecure_channel(f"unix:{sockets}/grpc.sock") as channel:
        yield Client(channel)
    await server.stop(0)


@pytest.fixture
async def client(serving, sockets):
    async with served(serving, sockets) as client:
        yield client


def request(text: str = "The capital", model: str = "demo", stream: bool = False, **parameters: int | float):
    message = pb.ModelInferRequest(model_name=model, id="a")
    message.inputs.add(name="text_input", datatype="BYTES", shape=[1]).contents.bytes_contents.append(text.encode())
    if stream:
        message.inputs.add(name="stream", datatype="BOOL", shape=[1]).contents.bool_contents.append(True)
    for name, value in {"temperature": 0, **parameters}.items():
        setattr(message.parameters[name], "double_param" if isinstance(value, float) else "int64_param", value)
    return message


async def test_what_it_tells(client):
    assert (await client.ask("ServerLive", pb.ServerLiveRequest(), pb.ServerLiveResponse)).live
    assert (await client.ask("ServerReady", pb.ServerReadyRequest(), pb.ServerReadyResponse)).ready
    assert (await client.ask("ModelReady", pb.ModelReadyRequest(name="demo"), pb.ModelReadyResponse)).ready
    assert not (await client.ask("ModelReady", pb.ModelReadyRequest(name="none"), pb.ModelReadyResponse)).ready
    server = await client.ask("ServerMetadata", pb.ServerMetadataRequest(), pb.ServerMetadataResponse)
    assert server.version == "0.1.0"
    model = await client.ask("ModelMetadata", pb.ModelMetadataRequest(name="demo"), pb.ModelMetadataResponse)
    assert model.name == "demo"
    config = await client.ask("ModelConfig", pb.ModelConfigRequest(name="demo"), pb.ModelConfigResponse)
    assert config.config.name == "demo"
    index = await client.ask("RepositoryIndex", pb.RepositoryIndexRequest(), pb.RepositoryIndexResponse)
    assert [m.name for m in index.models] == ["demo"]


async def test_infer(client, serving):
    serving.worker.scripts.append(says(" of Spain"))
    answer = await client.ask("ModelInfer", request(), pb.ModelInferResponse)
    assert (answer.model_name, answer.id, answer.outputs[0].name) == ("demo", "a", "text_output")
    text = (
        answer.raw_output_contents[0]
        if answer.raw_output_contents
        else b"".join(answer.outputs[0].contents.bytes_contents)
    )
    assert text.endswith(b" of Spain")
    assert serving.services.admission.in_flight == 0


async def test_stream(client, serving):
    serving.worker.scripts.append(says(" of Spain"))
    answers = await client.stream(request(stream=True, triton_enable_empty_final_response=1))
    assert all(not a.error_message for a in answers)
    texts = [a.infer_response.raw_output_contents[0][4:] for a in answers if a.infer_response.raw_output_contents]
    assert b"".join(texts) == b" of Spain"


@pytest.mark.parametrize(("script", "code"), [
    (Script(fail_after=0), "INTERNAL"),
    (Script(fail_after=0, failure=Failure(FailureCode.OVERLOADED)), "UNAVAILABLE"),
    (Script(tokens=ids(" of"), finish=FinishReason.TIMEOUT), "DEADLINE_EXCEEDED"),
    (Script(die_after=0), "UNAVAILABLE"),
])  # fmt: skip
async def test_failures(client, serving, script, code):
    serving.worker.default = script
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await client.ask("ModelInfer", request(), pb.ModelInferResponse)
    assert caught.value.code() is grpc.StatusCode[code]


@pytest.mark.parametrize(("message", "code"), [
    (request(model="none"), "NOT_FOUND"),
    (request(temperature=-1), "INVALID_ARGUMENT"),
    *((request(timeout=value), "INVALID_ARGUMENT") for value in (-1, math.nan, math.inf, 2.0**65)),
    *((request(**{name: math.nan}), "INVALID_ARGUMENT") for name in ("temperature", "top_p", "repetition_penalty", "len_penalty")),
    (pb.ModelInferRequest(model_name="demo"), "INVALID_ARGUMENT"),
])  # fmt: skip
async def test_refused(client, message, code):
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await client.ask("ModelInfer", message, pb.ModelInferResponse)
    assert caught.value.code() is grpc.StatusCode[code]


async def test_errors_of_a_stream_are_messages(client):
    (answer,) = await client.stream(request(model="none", stream=True))
    assert "none" in answer.error_message


class Nonsense:
    """A message that cannot be decoded."""

    def SerializeToString(self) -> bytes:
        return b"\xff"


async def test_what_is_no_request_ends_a_stream(client, serving):
    serving.worker.default = Script(gate_after=1)

    async def requests():
        yield request(stream=True)
        await eventually(lambda: serving.worker.submits)
        yield Nonsense()

    with pytest.raises(grpc.aio.AioRpcError, match=r"the message is no inference\.ModelInferRequest") as caught:
        await client.flow(requests())
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    await eventually(lambda: serving.worker.aborted and not serving.services.admission.in_flight)


def stop_signal(request_id: str, wanted: bool = True) -> pb.ModelInferRequest:
    """As TensorRT-LLM's clients send it."""
    message = pb.ModelInferRequest(model_name="demo", id=request_id)
    message.inputs.add(name="input_ids", datatype="INT32", shape=[1, 1]).contents.int_contents.append(0)
    message.inputs.add(name="stop", datatype="BOOL", shape=[1, 1]).contents.bool_contents.append(wanted)
    return message


async def test_a_signal_stops_the_request_of_its_id_and_no_other(client, serving):
    gate = Gate()
    serving.worker.scripts += [says(" never", gate_after=1, gate=Gate()), says(" of Spain", gate_after=1, gate=gate)]
    other = request(stream=True)
    other.id = "b"

    async def requests():
        for count, message in enumerate((request(stream=True), other), 1):
            yield message
            await eventually(lambda count=count: len(serving.worker.submits) == count)
        yield stop_signal("a")
        await eventually(lambda: serving.worker.aborted)
        gate.open()

    answers = await client.flow(requests())
    assert [answer.error_message for answer in answers if answer.error_message] == []
    found = [answer.infer_response for answer in answers]
    assert [
        len(each.outputs) for each in found if each.id == "a" and each.parameters["triton_final_response"].bool_param
    ] == [0]
    assert b"".join(raw[4:] for each in found if each.id == "b" for raw in each.raw_output_contents[:1]) == b" of Spain"
    assert serving.services.admission.in_flight == 0


async def test_a_signal_without_an_id_or_outside_of_a_stream_stops_nothing(client):
    (answer,) = await client.stream(stop_signal(""))
    assert "stop needs the id" in answer.error_message
    with pytest.raises(grpc.aio.AioRpcError, match="ModelStreamInfer"):
        await client.ask("ModelInfer", stop_signal("a"), pb.ModelInferResponse)
    assert (await client.ask("ModelInfer", stop_signal("a", wanted=False), pb.ModelInferResponse)).id == "a"


async def test_keys(client, serving):
    serving.services.authenticator.required = True
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await client.ask("ModelInfer", request(), pb.ModelInferResponse)
    assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED
    assert (await client.ask("ServerLive", pb.ServerLiveRequest(), pb.ServerLiveResponse)).live


async def test_a_stream_waits_for_the_first_worker(sockets):
    serving = Serving(fake_workers(sockets, 1))
    serving.router.hold_s = 60.0
    serving.publish([])
    serving.router.start()
    async with served(serving, sockets) as client:
        answering = asyncio.ensure_future(client.stream(request(stream=True)))
        await eventually(lambda: serving.router.holding.deployments)
        serving.worker.scripts.append(says(" of Spain"))
        await serving.start()
        answers = await answering
    await serving.stop()
    assert [a.error_message for a in answers if a.error_message] == []
    assert b"".join(raw[4:] for a in answers for raw in a.infer_response.raw_output_contents[:1]) == b" of Spain"


async def test_a_drain_ends_well_the_streams_whose_clients_have_sent_all(client, serving):
    gate = Gate()
    serving.worker.scripts.append(says(" of Spain", gate_after=1, gate=gate))
    answering = asyncio.ensure_future(client.stream(request(stream=True)))
    await eventually(lambda: serving.worker.submits)
    serving.services.admission.draining = True
    gate.open()
    answers = await answering
    assert b"".join(raw[4:] for a in answers for raw in a.infer_response.raw_output_contents[:1]) == b" of Spain"


async def test_a_drain_refuses(client, serving):
    serving.services.admission.draining = True
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await client.ask("ModelInfer", request(), pb.ModelInferResponse)
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE


@pytest.mark.parametrize("kind", ["System", "Cuda"])
async def test_shared_memory_is_switched_off(client, kind):
    def message(name: str):
        return getattr(pb, f"{kind}SharedMemory{name}")

    none = await client.ask(f"{kind}SharedMemoryStatus", message("StatusRequest")(), message("StatusResponse"))
    assert not none.regions
    for method, code, words in [
        ("Status", "NOT_FOUND", f"Unable to find {kind.lower()} shared memory region: 'a'"),
        ("Register", "UNIMPLEMENTED", "Client shared memory is disabled."),
        ("Unregister", "UNIMPLEMENTED", "Client shared memory is disabled."),
    ]:
        asked = message(f"{method}Request")(name="a")
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await client.ask(f"{kind}SharedMemory{method}", asked, message(f"{method}Response"))
        assert (caught.value.code(), caught.value.details()) == (grpc.StatusCode[code], words)


@pytest.mark.parametrize(("place", "parameter", "value", "code"), [
    ("inputs", "shared_memory_region", "a", "NOT_FOUND"),
    ("outputs", "shared_memory_region", "a", "NOT_FOUND"),
    ("outputs", "classification", 3, "UNIMPLEMENTED"),
])  # fmt: skip
async def test_tensors_elsewhere_are_refused(client, place, parameter, value, code):
    message = request()
    tensor = message.inputs[0] if place == "inputs" else message.outputs.add(name="text_output")
    setattr(tensor.parameters[parameter], "string_param" if isinstance(value, str) else "int64_param", value)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await client.ask("ModelInfer", message, pb.ModelInferResponse)
    assert caught.value.code() is grpc.StatusCode[code]


async def test_settings_are_read_and_not_updated(client):
    trace = await client.ask("TraceSetting", pb.TraceSettingRequest(model_name="demo"), pb.TraceSettingResponse)
    assert list(trace.settings["trace_level"].value) == ["OFF"]
    asked = pb.TraceSettingRequest()
    asked.settings["trace_level"].value.append("OFF")
    asked.settings["trace_rate"].value.extend([])
    again = await client.ask("TraceSetting", asked, pb.TraceSettingResponse)
    assert again.settings == trace.settings
    log = await client.ask("LogSettings", pb.LogSettingsRequest(), pb.LogSettingsResponse)
    assert log.settings["log_info"].bool_param
    assert log.settings["log_format"].string_param == "default"
    asked = pb.TraceSettingRequest()
    asked.settings["trace_rate"].value.extend(["1", "2"])
    for method, message, code in [
        ("TraceSetting", asked, "INVALID_ARGUMENT"),
        ("TraceSetting", pb.TraceSettingRequest(model_name="none"), "INVALID_ARGUMENT"),
        ("LogSettings", log_update(log_file="x"), "UNIMPLEMENTED"),
        ("LogSettings", log_update(log_info="x"), "INVALID_ARGUMENT"),
        ("LogSettings", log_update(log_verbose_level=1), "UNAVAILABLE"),
    ]:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await client.ask(method, message, pb.LogSettingsResponse)
        assert caught.value.code() is grpc.StatusCode[code]


def log_update(**settings: object) -> pb.LogSettingsRequest:
    message = pb.LogSettingsRequest()
    for name, value in settings.items():
        setattr(message.settings[name], "string_param" if isinstance(value, str) else "uint32_param", value)
    return message
