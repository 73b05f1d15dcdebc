"""A user of TorchServe's inference service."""

from __future__ import annotations

from typing import Any

from loadtests.current import Order
from loadtests.settings import MODEL
from loadtests.users.base import Answer, Question
from loadtests.users.rpc import Method, RpcUser


class TorchServeStreamUser(RpcUser):
    """StreamPredictions: a message for each token that shows. Nothing says how many tokens there were, so that messages are
    counted; the end is the call's status.
    """

    method = Method(
        "torchserve.proto",
        "org.pytorch.serve.grpc.inference.InferenceAPIsService",
        "StreamPredictions",
        "PredictionsRequest",
        "PredictionResponse",
        asks_once=True,
    )
    exact = False

    def address(self, order: Order) -> str:
        return order.addresses.torchserve_grpc

    def request(self, question: Question, message: Any) -> Any:
        values = {
            "data": question.prompt.encode(),
            "max_tokens": b"%d" % question.output_tokens,
            "temperature": b"0",
            "ignore_eos": b"true",
        }
        if question.adapter:
            values["lora_adapter"] = question.adapter.encode()
        return message(model_name=MODEL, input=values)

    def read(self, message: Any, answer: Answer) -> None:
        answer.piece(1)

    def finished(self, answer: Answer) -> None:
        answer.ended = True
