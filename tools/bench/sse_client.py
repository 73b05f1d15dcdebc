"""A small HTTP client for benchmarks. It counts events and bytes without parsing them, to use little CPU."""

from __future__ import annotations

import asyncio
import json
import time
from dataclasses import dataclass, field


@dataclass
class Stream:
    """One stream's times in seconds, its count of events, and the last part of what came."""

    ttft_s: float = 0.0
    gaps_s: list[float] = field(default_factory=list)
    events: int = 0
    tail: bytes = b""


async def post(port: int, path: str, body: object, mark: bytes = b"data: {") -> Stream:
    """POST on a connection of its own and read the answer to its end; raises on any status but 200. `mark` is in each event."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    content = json.dumps(body).encode()
    start = time.perf_counter()
    head = f"POST {path} HTTP/1.1\r\nhost: bench\r\ncontent-type: application/json\r\nconnection: close\r\ncontent-length: {len(content)}\r\n\r\n"
    writer.write(head.encode() + content)
    stream, previous = Stream(), start
    status = await reader.readline()
    if b" 200 " not in status:
        raise RuntimeError((status + await reader.read()).decode())
    while chunk := await reader.read(65536):
        stream.tail = (stream.tail + chunk)[-1024:]
        events = chunk.count(mark)
        if events:
            now = time.perf_counter()
            if stream.events == 0:
                stream.ttft_s = now - start
            else:
                stream.gaps_s.append(now - previous)
            stream.events += events
            previous = now
    writer.close()
    return stream
