"""Measures the web process: CPU time per streamed event and per POST, as ratios to a bare server in the same run.

    python -m tools.bench.web [--rounds 3]

The floor is the same HTTP server with handlers that only encode JSON (`tools/bench/floor_server.py`). The engine is another
process and does not count.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import psutil

from loadtests.server import free_port, running_server
from tools.bench.sse_client import post

ROOT = Path(__file__).resolve().parents[2]
STREAMS, TOKENS, POSTS, CONNECTIONS = 32, 128, 480, 16


def cpu_s(process: psutil.Process) -> float:
    """User and system time of the process alone."""
    times = process.cpu_times()
    return times.user + times.system


async def per_event_us(port: int, path: str, body: object, process: psutil.Process, mark: bytes) -> float:
    """CPU microseconds per event over 32 streams."""
    before = cpu_s(process)
    streams = await asyncio.gather(*(post(port, path, body, mark) for _ in range(STREAMS)))
    return (cpu_s(process) - before) * 1e6 / sum(stream.events for stream in streams)


async def per_post_us(port: int, path: str, body: object, process: psutil.Process) -> float:
    """CPU microseconds per POST over 16 kept connections."""
    content = json.dumps(body).encode()
    request = f"POST {path} HTTP/1.1\r\nhost: bench\r\ncontent-length: {len(content)}\r\n\r\n".encode() + content

    async def connection() -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        for _ in range(POSTS // CONNECTIONS):
            writer.write(request)
            head = await reader.readuntil(b"\r\n\r\n")
            if b" 200 " not in head.split(b"\r\n", 1)[0]:
                raise RuntimeError(head.decode())
            length = next(x for x in head.lower().split(b"\r\n") if x.startswith(b"content-length:"))
            await reader.readexactly(int(length.split(b":")[1]))
        writer.close()

    before = cpu_s(process)
    await asyncio.gather(*(connection() for _ in range(CONNECTIONS)))
    return (cpu_s(process) - before) * 1e6 / POSTS


SSE, NUL, TIGHT = b"data: {", b"\0", b"data:{"
PROMPT = "Once upon a time"
OPENAI = {"model": "demo", "prompt": PROMPT, "temperature": 0, "ignore_eos": True}
CHAT = {"model": "demo", "messages": [{"role": "user", "content": PROMPT}], "temperature": 0, "ignore_eos": True}
TENSOR = {"name": "text_input", "shape": [1], "datatype": "BYTES", "data": [PROMPT]}
IDS = {"name": "input0", "shape": [1, 4], "datatype": "UINT32", "data": [40, 41, 42, 43]}
MINDIE = {"text_input": PROMPT}
LONG = {"max_new_tokens": TOKENS, "do_sample": True, "temperature": 5.0, "seed": 1}
"""Where a text cannot be told to go on behind its end: hot enough to hardly ever end."""

ITEMS = {"type": "array", "items": {"const": 1}, "minItems": TOKENS, "maxItems": TOKENS}
SCHEMA = {"type": "object", "properties": {"a": ITEMS}, "required": ["a"], "additionalProperties": False}
ARRAY = {"format": {"type": "json_schema", "name": "a", "schema": SCHEMA}}

# dialect: (plane, path of a stream, its body, what marks an event, path of one answer, its body); None: no such route
Case = tuple[str, str | None, dict[str, Any], bytes, str, dict[str, Any]]
CASES: dict[str, Case] = {
    "OpenAI completions": ("front", "/v1/completions", {**OPENAI, "stream": True, "max_tokens": TOKENS}, SSE,
                           "/v1/completions", {**OPENAI, "max_tokens": 1}),
    "OpenAI chat": ("front", "/v1/chat/completions", {**CHAT, "stream": True, "max_tokens": TOKENS}, SSE,
                    "/v1/chat/completions", {**CHAT, "max_tokens": 1}),
    "OpenAI responses": ("front", "/v1/responses", {"input": PROMPT, "stream": True, "max_output_tokens": TOKENS,
                         "temperature": 0, "text": ARRAY}, SSE, "/v1/responses",
                         {"input": PROMPT, "max_output_tokens": 1}),
    "vLLM generate": ("front", "/generate", {"prompt": PROMPT, "temperature": 0, "ignore_eos": True, "stream": True,
                      "max_tokens": TOKENS}, NUL, "/generate", {"prompt": PROMPT, "temperature": 0, "max_tokens": 1}),
    "TGI": ("front", "/generate_stream", {"inputs": PROMPT, "parameters": LONG}, SSE,
            "/generate", {"inputs": PROMPT, "parameters": {"max_new_tokens": 1}}),
    "Triton generate": ("front", "/v2/models/demo/generate_stream", {"text_input": PROMPT, "max_tokens": TOKENS,
                        "temperature": 0, "ignore_eos": True}, SSE, "/v2/models/demo/generate",
                        {"text_input": PROMPT, "max_tokens": 1, "temperature": 0}),
    "Triton infer": ("front", None, {}, b"", "/v2/models/demo/infer",
                     {"inputs": [TENSOR], "parameters": {"max_tokens": 1, "temperature": 0}}),
    "MindIE completions": ("mindie", "/v1/completions", {**OPENAI, "stream": True, "max_tokens": TOKENS}, SSE,
                           "/v1/completions", {**OPENAI, "max_tokens": 1}),
    "MindIE chat": ("mindie", "/v1/chat/completions", {**CHAT, "stream": True, "max_tokens": TOKENS}, SSE,
                    "/v1/chat/completions", {**CHAT, "max_tokens": 1}),
    "MindIE TGI": ("mindie", "/generate_stream", {"inputs": PROMPT, "parameters": LONG}, SSE,
                   "/generate", {"inputs": PROMPT, "parameters": {"max_new_tokens": 1}}),
    "MindIE vLLM": ("mindie", "/generate", {"prompt": PROMPT, "ignore_eos": True, "stream": True, "max_tokens": TOKENS},
                    NUL, "/generate", {"prompt": PROMPT, "max_tokens": 1}),
    "MindIE native": ("mindie", "/infer", {"inputs": PROMPT, "stream": True, "parameters": LONG},
                      SSE, "/infer", {"inputs": PROMPT, "parameters": {"max_new_tokens": 1}}),
    "MindIE Triton": ("mindie", "/v2/models/demo/generate_stream", {**MINDIE, "parameters": LONG},
                      TIGHT, "/v2/models/demo/generate", {**MINDIE, "parameters": {"max_new_tokens": 1}}),
    "MindIE Triton infer": ("mindie", None, {}, b"", "/v2/models/demo/infer", {"inputs": [IDS], "outputs": [{"name": "o"}],
                            "parameters": {"max_new_tokens": 1}}),
}  # fmt: skip


async def measure(
    rounds: int, floor_port: int, floor: psutil.Process, ports: dict[str, int], ours: psutil.Process
) -> None:
    """All in turn, the floor before each; medians."""
    print("| dialect | event µs | of the floor's | POST µs | of the floor's |\n| --- | --- | --- | --- | --- |")
    for name, (plane, stream_path, stream_body, mark, path, body) in CASES.items():
        events: list[float] = []
        floor_events: list[float] = []
        posts: list[float] = []
        floor_posts: list[float] = []
        for _ in range(rounds):
            if stream_path is not None:
                floor_events.append(await per_event_us(floor_port, "/stream", {}, floor, SSE))
                events.append(await per_event_us(ports[plane], stream_path, stream_body, ours, mark))
            floor_posts.append(await per_post_us(floor_port, "/", body, floor))
            posts.append(await per_post_us(ports[plane], path, body, ours))
        cells = [_cell(events, floor_events), _cell(posts, floor_posts)]
        print(f"| {name} | {' | '.join(cells)} |", flush=True)


def _cell(ours: list[float], floor: list[float]) -> str:
    if not ours:
        return "| "
    mine, bare = statistics.median(ours), statistics.median(floor)
    return f"{mine:.0f} | {mine / bare:.2f}"


def main() -> None:
    """Start both servers, measure in turn."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    floor_port = free_port()
    floor = subprocess.Popen(
        [sys.executable, "-W", "ignore", "-m", "tools.bench.floor_server", str(floor_port)], cwd=ROOT
    )
    try:
        mindie = free_port()
        settings = {"MINDIE_PORT": str(mindie), "MINDIE_MANAGEMENT_PORT": "0", "MINDIE_METRICS_PORT": "0"}
        with running_server(settings) as url:
            time.sleep(1)
            ports = {"front": urlsplit(url).port or 0, "mindie": mindie}
            children = psutil.Process().children()
            ours = next(child for child in children if "serve" in child.cmdline())
            asyncio.run(measure(options.rounds, floor_port, psutil.Process(floor.pid), ports, ours))
    finally:
        floor.terminate()
        floor.wait()


if __name__ == "__main__":
    main()
