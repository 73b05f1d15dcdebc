"""OpenAI's streams as LMI's handler sends them on SageMaker's routes: one JSON document a line, instead of events."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from inference.http.exchange import Send

EVENTS, LINES = b"text/event-stream", b"application/jsonlines"
PREFIX, DONE = b"data: ", b"[DONE]"


def as_lines(send: Send) -> Send:
    """Sends events as lines; responses of other types are left as they are."""
    streaming, rest = False, b""

    async def through(message: dict[str, Any]) -> None:
        nonlocal streaming, rest
        if message["type"] == "http.response.start":
            headers = [(name, LINES if _is_events(name, value) else value) for name, value in message["headers"]]
            streaming = headers != list(message["headers"])
            message = {**message, "headers": headers}
        elif streaming:
            *complete, rest = (rest + message.get("body", b"")).split(b"\n")
            found = b"".join(_line(text) for text in complete)
            if not found and message.get("more_body"):
                return
            message = {**message, "body": found}
        await send(message)

    return through


def _is_events(name: bytes, value: bytes) -> bool:
    return name.lower() == b"content-type" and value.startswith(EVENTS)


def _line(text: bytes) -> bytes:
    """The line of an event's data; nothing for the end of the stream, comments and empty lines."""
    value = text.removeprefix(PREFIX).strip()
    return value + b"\n" if text.startswith(PREFIX) and value != DONE else b""
