"""Users of MindIE's own dialect, on its service plane."""

from __future__ import annotations

from typing import Any

from loadtests.current import Order
from loadtests.users.base import Answer, Question
from loadtests.users.http import HttpUser, data


class MindIEUser(HttpUser):
    """Whole answers of /infer."""

    exact = False

    def url(self, order: Order) -> str:
        return f"{order.addresses.mindie}/infer"

    def body(self, question: Question) -> dict[str, Any]:
        return {"inputs": question.prompt, "parameters": {"max_new_tokens": question.output_tokens, "details": True}}

    def read(self, frame: bytes, answer: Answer) -> None:
        details = data(frame)["details"]
        answer.tokens, answer.ended = details["generated_tokens"], bool(details["finish_reason"])


class MindIEStreamUser(MindIEUser):
    """Streams of /infer_token. The frame at the end has no text, and the details."""

    separator = b"\n\n"

    def url(self, order: Order) -> str:
        return f"{order.addresses.mindie}/infer_token"

    def body(self, question: Question) -> dict[str, Any]:
        return {**super().body(question), "stream": True}

    def read(self, frame: bytes, answer: Answer) -> None:
        if b'"token":' not in frame:
            answer.detail = frame[:200].decode(errors="replace")
            return
        answer.piece()
        if b'"details":{' in frame:
            super().read(frame, answer)
