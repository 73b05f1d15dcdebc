"""The baseline of `tools.bench.web`: the HTTP server with handlers that only encode JSON."""

from __future__ import annotations

import asyncio
import sys
from typing import Any

from inference.server.plane_server import PlaneServer  # first: installs the asyncio reactor

# isort: split
import msgspec

from inference.server.listener import Listener

EVENTS = 128
TICK_S = 0.02
HEADERS = [(b"content-type", b"text/event-stream")]
CHUNK = {"id": "cmpl-0123456789abcdef", "object": "text_completion", "created": 1, "model": "demo", "choices": [
    {"index": 0, "text": " word", "logprobs": None, "finish_reason": None, "stop_reason": None}]}  # fmt: skip


async def application(scope: dict[str, Any], receive: Any, send: Any) -> None:
    """POST / answers once; POST /stream sends a chunk a tick."""
    msgspec.json.decode((await receive())["body"] or b"{}")
    if scope["path"] != "/stream":
        body = msgspec.json.encode(CHUNK)
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"%d" % len(body))]})
        await send({"type": "http.response.body", "body": body})
        return
    await send({"type": "http.response.start", "status": 200, "headers": HEADERS})
    for _ in range(EVENTS):
        await asyncio.sleep(TICK_S)
        frame = b"data: " + msgspec.json.encode(CHUNK) + b"\n\n"
        await send({"type": "http.response.body", "body": frame, "more_body": True})
    await send({"type": "http.response.body", "body": b""})


async def nothing() -> None:
    """At the drain's end there is nothing to end."""


if __name__ == "__main__":
    PlaneServer(
        application,
        [Listener("127.0.0.1", int(sys.argv[1]))],
        refuse=lambda host, port, method, path, status: ([(b"content-type", b"text/plain")], b"", b""),
        preview=lambda host, port, method, path, headers: None,
        overloaded=lambda host, port, method, path, headers: None,
        max_body_bytes=lambda host, port: 1 << 20,
        drain_s=1.0,
        linger_s=0.0,
        slow_client_timeout_s=30.0,
        headers_timeout_s=10.0,
        body_timeout_s=60.0,
        max_connections=4096,
        on_ready=lambda: None,
        on_leave=list,
        on_drain=lambda: None,
        on_deadline=nothing,
    ).run()
