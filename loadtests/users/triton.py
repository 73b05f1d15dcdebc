"""Users of Triton's dialect: generate, generate_stream and infer over HTTP, ModelStreamInfer over gRPC."""

from __future__ import annotations

import json
from typing import Any

from loadtests.current import Order
from loadtests.settings import MODEL
from loadtests.users.base import Answer, Question
from loadtests.users.http import HttpUser, data
from loadtests.users.rpc import Method, RpcUser


class TritonGenerateUser(HttpUser):
    """Whole answers of generate."""

    def url(self, order: Order) -> str:
        return f"{order.addresses.front}/v2/models/{MODEL}/generate"

    def body(self, question: Question) -> dict[str, Any]:
        return {"text_input": question.prompt, "parameters": {**parameters(question), **COUNTED}}

    def read(self, data: bytes, answer: Answer) -> None:
        parsed = json.loads(data)
        answer.tokens, answer.ended = parsed["num_output_tokens"], parsed["finish_reason"] == "length"


class TritonStreamUser(TritonGenerateUser):
    """generate_stream: an event for each step."""

    separator = b"\n\n"

    def url(self, order: Order) -> str:
        return f"{order.addresses.front}/v2/models/{MODEL}/generate_stream"

    def read(self, frame: bytes, answer: Answer) -> None:
        parsed = data(frame)
        if "text_output" not in parsed:
            answer.detail = frame[:200].decode(errors="replace")
            return
        answer.piece(parsed["num_output_tokens"])
        answer.ended = parsed["finish_reason"] == "length"


class TritonInferUser(HttpUser):
    """infer with a tensor of text; the ids of the answer are counted."""

    def url(self, order: Order) -> str:
        return f"{order.addresses.front}/v2/models/{MODEL}/infer"

    def body(self, question: Question) -> dict[str, Any]:
        text = {"name": "text_input", "shape": [1], "datatype": "BYTES", "data": [question.prompt]}
        return {"inputs": [text], "outputs": [{"name": "output0"}], "parameters": parameters(question)}

    def read(self, data: bytes, answer: Answer) -> None:
        outputs = {output["name"]: output["data"] for output in json.loads(data)["outputs"]}
        answer.tokens, answer.ended = len(outputs["output0"]), True


class TritonGrpcUser(RpcUser):
    """One request in a stream; a response for each step, of which the last is marked."""

    method = Method(
        "triton.proto",
        "inference.GRPCInferenceService",
        "ModelStreamInfer",
        "ModelInferRequest",
        "ModelStreamInferResponse",
    )

    def address(self, order: Order) -> str:
        return order.addresses.triton_grpc

    def request(self, question: Question, message: Any) -> Any:
        request = message(model_name=MODEL)
        tensor = request.inputs.add(name="text_input", datatype="BYTES", shape=[1])
        tensor.contents.bytes_contents.append(question.prompt.encode())
        for name, value in {**parameters(question), "stream": True, "return_num_output_tokens": True}.items():
            field = {bool: "bool_param", int: "int64_param", str: "string_param"}[type(value)]
            setattr(request.parameters[name], field, value)
        return request

    def read(self, message: Any, answer: Answer) -> None:
        if message.error_message:
            answer.detail = message.error_message[:200]
            return
        response = message.infer_response
        for output, raw in zip(response.outputs, response.raw_output_contents, strict=False):
            if output.name == "num_output_tokens":
                answer.piece(int.from_bytes(raw[:4], "little"))
        answer.ended = response.parameters["triton_final_response"].bool_param


COUNTED = {"return_num_output_tokens": True, "return_finish_reason": True}


def parameters(question: Question) -> dict[str, Any]:
    """Greedy, and of a fixed length."""
    found = {"max_tokens": question.output_tokens, "temperature": 0, "ignore_eos": True}
    return {**found, "lora_name": question.adapter} if question.adapter else found
