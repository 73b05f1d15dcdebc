"""What the web process spends: CPU time per streamed event and per POST, as ratios to a bare server in the same run.

    python -m scripts.bench_web [--rounds 3]

The floor is our own HTTP server with handlers that only encode JSON (`scripts/floor_server.py`). Ours is the whole
server with the demo model; its engine is another process, whose time is not counted.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import socket
import statistics
import subprocess
import sys
import time
from pathlib import Path
from urllib.parse import urlsplit

import psutil

from loadtests.server import running_server
from scripts.sse_client import post

ROOT = Path(__file__).resolve().parent.parent
STREAMS, TOKENS, POSTS, CONNECTIONS = 32, 128, 480, 16


def cpu_s(process: psutil.Process) -> float:
    """User and system time of the process alone."""
    times = process.cpu_times()
    return times.user + times.system


async def per_event_us(port: int, path: str, body: object, process: psutil.Process) -> float:
    """CPU microseconds per event over 32 streams."""
    before = cpu_s(process)
    streams = await asyncio.gather(*(post(port, path, body) for _ in range(STREAMS)))
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


async def measure(rounds: int, floor_port: int, floor: psutil.Process, port: int, ours: psutil.Process) -> None:
    """In turn; medians."""
    prompt = {"prompt": "Once upon a time", "temperature": 0, "ignore_eos": True}
    inputs = {"inputs": "Once upon a time", "parameters": {"max_new_tokens": 1}}
    cases = {
        "event": [
            ("floor", floor_port, "/stream", {}, floor),
            ("openai", port, "/v1/completions", {**prompt, "max_tokens": TOKENS, "stream": True}, ours),
            ("tgi", port, "/generate_stream", {**inputs, "parameters": {"max_new_tokens": TOKENS}}, ours),
        ],
        "POST": [
            ("floor", floor_port, "/", prompt, floor),
            ("openai", port, "/v1/completions", {**prompt, "max_tokens": 1}, ours),
            ("tgi", port, "/generate", inputs, ours),
        ],
    }
    print("| per | floor µs | OpenAI µs | ratio | TGI µs | ratio |\n| --- | --- | --- | --- | --- | --- |")
    for name, servers in cases.items():
        found: dict[str, list[float]] = {key: [] for key, *_ in servers}
        for _ in range(rounds):
            for key, *arguments in servers:
                run = per_event_us if name == "event" else per_post_us
                found[key].append(await run(*arguments))
        floor_us, openai_us, tgi_us = (statistics.median(values) for values in found.values())
        ratios = (openai_us / floor_us, tgi_us / floor_us)
        print(
            f"| {name} | {floor_us:.0f} | {openai_us:.0f} | {ratios[0]:.2f} | {tgi_us:.0f} | {ratios[1]:.2f} |",
            flush=True,
        )


def main() -> None:
    """Start both servers, measure in turn."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        floor_port = probe.getsockname()[1]
    floor = subprocess.Popen([sys.executable, "-W", "ignore", "-m", "scripts.floor_server", str(floor_port)], cwd=ROOT)
    try:
        with running_server({}) as url:
            time.sleep(1)
            port = urlsplit(url).port or 0
            children = psutil.Process().children()
            ours = next(child for child in children if "serve" in child.cmdline())
            asyncio.run(measure(options.rounds, floor_port, psutil.Process(floor.pid), port, ours))
    finally:
        floor.terminate()
        floor.wait()


if __name__ == "__main__":
    main()
