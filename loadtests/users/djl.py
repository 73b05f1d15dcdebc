"""A user of DJL Serving's dialect, with the schema of Large Model Inference."""

from __future__ import annotations

import json
from typing import Any

from loadtests.current import Order
from loadtests.users.base import Answer, Question
from loadtests.users.http import HttpUser


class DJLStreamUser(HttpUser):
    """A line of JSON for each token; the last one has the details."""

    separator = b"\n"

    def url(self, order: Order) -> str:
        return f"{order.addresses.djl}/invocations"

    def body(self, question: Question) -> dict[str, Any]:
        found: dict[str, Any] = {
            "inputs": question.prompt,
            "stream": True,
            "parameters": {
                "max_new_tokens": question.output_tokens,
                "details": True,
                "ignore_eos_token": True,
            },
        }
        return {**found, "adapters": question.adapter} if question.adapter else found

    def read(self, line: bytes, answer: Answer) -> None:
        if b'"token":' not in line:
            answer.detail = line[:200].decode(errors="replace")
            return
        answer.piece(1)
        if b'"generated_text"' in line:
            details = json.loads(line)["details"]
            answer.ended = details["finish_reason"] == "length" and details["generated_tokens"] == answer.tokens
