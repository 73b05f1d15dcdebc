"""Users of OpenAI's dialect: completions and chats, streamed and whole."""

from __future__ import annotations

import json
from typing import Any

from loadtests.current import Order
from loadtests.users.base import Answer, Question
from loadtests.users.http import HttpUser, data


class _Whole(HttpUser):
    """An answer at once; its usage says how many tokens it has."""

    abstract = True

    def read(self, data: bytes, answer: Answer) -> None:
        parsed = json.loads(data)
        answer.tokens = parsed["usage"]["completion_tokens"]
        answer.ended = all(choice["finish_reason"] == "length" for choice in parsed["choices"])


class _Stream(HttpUser):
    """Events until [DONE]; the last chunk but one has the usage. Chunks with text are not parsed, to save time."""

    abstract = True
    separator = b"\n\n"

    def read(self, frame: bytes, answer: Answer) -> None:
        if frame.startswith(b"data: [DONE]"):
            answer.ended = True
        elif b'"choices":[]' in frame:
            answer.tokens = int(data(frame)["usage"]["completion_tokens"])
        elif self.has_text(frame):
            answer.piece()
        elif b'"error"' in frame:
            answer.detail = frame[:200].decode(errors="replace")

    def has_text(self, frame: bytes) -> bool:
        """Whether the chunk has a token; here each one with a choice."""
        return b'"choices":[{' in frame


class OpenAICompletionUser(_Whole):
    """Whole completions."""

    def url(self, order: Order) -> str:
        return f"{order.addresses.front}/v1/completions"

    def body(self, question: Question) -> dict[str, Any]:
        return completion(question)


class OpenAICompletionStreamUser(_Stream):
    """Streamed completions."""

    def url(self, order: Order) -> str:
        return f"{order.addresses.front}/v1/completions"

    def body(self, question: Question) -> dict[str, Any]:
        return {**completion(question), **STREAMED}


class OpenAIChatUser(_Whole):
    """Whole chats."""

    def url(self, order: Order) -> str:
        return f"{order.addresses.front}/v1/chat/completions"

    def body(self, question: Question) -> dict[str, Any]:
        return chat(question)


class OpenAIChatStreamUser(_Stream):
    """Streamed chats."""

    def url(self, order: Order) -> str:
        return f"{order.addresses.front}/v1/chat/completions"

    def body(self, question: Question) -> dict[str, Any]:
        return {**chat(question), **STREAMED}

    def has_text(self, frame: bytes) -> bool:
        """The first chunk has the role and no text."""
        return b'"content":"' in frame and b'"content":""' not in frame


STREAMED = {"stream": True, "stream_options": {"include_usage": True}}


def sampling(question: Question) -> dict[str, Any]:
    """Greedy, and of a fixed length, so that each request is the same work."""
    return {"model": question.model, "max_tokens": question.output_tokens, "temperature": 0, "ignore_eos": True}


def completion(question: Question) -> dict[str, Any]:
    """The body of a completion."""
    return {**sampling(question), "prompt": question.prompt}


def chat(question: Question) -> dict[str, Any]:
    """The body of a chat."""
    return {**sampling(question), "messages": question.messages or [{"role": "user", "content": question.prompt}]}
