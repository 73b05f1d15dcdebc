"""Users of TGI's dialect. It has no parameter that ignores the end of a text, so answers may be shorter than asked for."""

from __future__ import annotations

import json
from typing import Any

from loadtests.current import Order
from loadtests.users.base import Answer, Question
from loadtests.users.http import HttpUser, data


class TGIUser(HttpUser):
    """Whole answers."""

    exact = False

    def url(self, order: Order) -> str:
        return f"{order.addresses.front}/generate"

    def body(self, question: Question) -> dict[str, Any]:
        return {"inputs": question.prompt, "parameters": parameters(question)}

    def read(self, data: bytes, answer: Answer) -> None:
        details = json.loads(data)["details"]
        answer.tokens, answer.ended = details["generated_tokens"], details["finish_reason"] in ENDS


class TGIStreamUser(TGIUser):
    """A frame for each token; the last one has the details."""

    separator = b"\n\n"

    def url(self, order: Order) -> str:
        return f"{order.addresses.front}/generate_stream"

    def read(self, frame: bytes, answer: Answer) -> None:
        if b'"token":' not in frame:
            answer.detail = frame[:200].decode(errors="replace")
            return
        answer.piece(1)
        if b'"finish_reason"' in frame:
            details = data(frame)["details"]
            answer.ended = details["finish_reason"] in ENDS and details["generated_tokens"] == answer.tokens


ENDS = ("length", "eos_token")


def parameters(question: Question) -> dict[str, Any]:
    """What TGI's routes take, here and on other planes."""
    found: dict[str, Any] = {"max_new_tokens": question.output_tokens, "details": True}
    return {**found, "adapter_id": question.adapter} if question.adapter else found
