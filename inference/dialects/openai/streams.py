"""The stream format of OpenAI's dialect."""

from __future__ import annotations

from inference.generation.answer import StreamFormat
from inference.http.exchange import Headers
from inference.http.sse import DONE
from inference.vendors import openai_errors

KEEP_ALIVE = b": keep-alive\n\n"
HEADERS: Headers = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]
STREAM = StreamFormat(HEADERS, openai_errors.render_event, keep_alive=KEEP_ALIVE, end=DONE)
