"""TorchServe's Open Inference Protocol in a real server: only if a setting says so."""

from __future__ import annotations

import grpc
import pytest

from inference.dialects.torchserve.grpc_open_inference import SERVICE
from inference.dialects.torchserve.protocol import open_inference_pb2 as pb
from tests.live import LiveServer

pytestmark = [pytest.mark.full, pytest.mark.live]


def infer(port):
    request = pb.ModelInferRequest(model_name="demo")
    text = b"Question: What is the capital of Spain?\nAnswer:"
    request.inputs.add(name="text_input", datatype="BYTES", shape=[1]).contents.bytes_contents.append(text)
    request.parameters["max_tokens"].int64_param = 7
    request.parameters["temperature"].int64_param = 0
    with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
        call = channel.unary_unary(
            f"/{SERVICE}/ModelInfer", pb.ModelInferRequest.SerializeToString, pb.ModelInferResponse.FromString
        )
        return call(request, timeout=60).outputs[0].contents.bytes_contents[0]


def test_it_works(server):
    assert infer(server.torchserve_inference_port) == b" The capital of Spain is Madrid."


def test_it_is_off_unless_a_setting_says_so(tmp_path):
    server = LiveServer(tmp_path / "var").start()
    with pytest.raises(grpc.RpcError) as caught:
        infer(server.torchserve_inference_port)
    assert caught.value.code() == grpc.StatusCode.UNIMPLEMENTED
    assert server.stop() == 0
