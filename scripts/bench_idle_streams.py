"""Measures the web process's memory for a stream that stays open and idle.

    python -m scripts.bench_idle_streams [--streams 2000] [--steps 4]

Streams of chats are opened in steps, each on a connection of its own. When each has had its first event the worker is suspended
(SIGSTOP), so that all are idle, and the process's private memory is read. The table has it for each step; the slope is that of a line
through all steps. At the end the clients leave, and the worker must have forgotten every sequence.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import re
import resource
import signal
import statistics
import time
import urllib.request
from contextlib import suppress
from dataclasses import dataclass

import psutil

from loadtests.server import RunningServer, served

TOKENS = 1900
BODY = {
    "messages": [{"role": "user", "content": "Hi"}],
    "max_tokens": TOKENS,
    "temperature": 0,
    "ignore_eos": True,
    "stream": True,
}
SETTLE_S = 2.0
"""Less than the 20 s of silence after which a suspended worker would be replaced."""
FORGOTTEN_S = 60.0
GAUGES = re.compile(r"^vllm:num_requests_(?:running|waiting)\S* (\S+)$", re.MULTILINE)


@dataclass(frozen=True)
class OpenStream:
    """A stream that has had its first event. What comes later is read and dropped, so that nothing waits to be sent."""

    writer: asyncio.StreamWriter
    rest: asyncio.Task[None]


async def read_on(reader: asyncio.StreamReader) -> None:
    """Read and drop until the stream ends, which none does here."""
    while await reader.read(1 << 16):
        pass
    raise RuntimeError("a stream ended before all were open")


async def open_stream(port: int) -> OpenStream:
    """A new stream on a connection of its own."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    content = json.dumps(BODY).encode()
    writer.write(b"POST /v1/chat/completions HTTP/1.1\r\nhost: bench\r\ncontent-type: application/json\r\n")
    writer.write(b"content-length: %d\r\n\r\n%s" % (len(content), content))
    status = await reader.readline()
    if b" 200 " not in status:
        raise RuntimeError(status.decode())
    await reader.readuntil(b"data: {")
    return OpenStream(writer, asyncio.create_task(read_on(reader)))


def private_mib(process: psutil.Process) -> float:
    """Memory of the process that it shares with no other, in MiB."""
    return float(process.memory_full_info().uss) / 2**20


async def measure(server: RunningServer, port: int, streams: int, steps: int) -> list[tuple[int, float, float]]:
    """For each step: open streams, MiB, and seconds until each of them had its first event."""
    web = psutil.Process(server.pid)
    workers = [child for child in web.children() if "engine" in child.cmdline()]
    opened = [await open_stream(port)]  # what the first stream alone loads is no stream's own
    rows = [(1, private_mib(web), 0.0)]
    for step in range(1, steps + 1):
        begin = time.monotonic()
        more = streams * step // steps - len(opened)
        opened += await asyncio.gather(*(open_stream(port) for _ in range(more)))
        took = time.monotonic() - begin
        for worker in workers:
            worker.send_signal(signal.SIGSTOP)
        await asyncio.sleep(SETTLE_S)
        rows.append((len(opened), private_mib(web), took))
        for worker in workers:
            worker.send_signal(signal.SIGCONT)
    for stream in opened:
        if stream.rest.done():
            stream.rest.result()
        stream.rest.cancel()
        stream.writer.transport.abort()
    return rows


def forgotten_s(url: str) -> float:
    """Seconds until no sequence runs or waits; raises TimeoutError."""
    begin = time.monotonic()
    while time.monotonic() - begin < FORGOTTEN_S:
        with suppress(OSError), urllib.request.urlopen(f"{url}/metrics") as answer:
            if not any(map(float, GAUGES.findall(answer.read().decode()))):
                return time.monotonic() - begin
        time.sleep(0.1)
    raise TimeoutError("sequences of clients that left still run")


def main() -> None:
    """Run all steps and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=2000)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--model", default="models/demo", help="A directory or a hub id.")
    arguments = parser.parse_args()
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    room = arguments.streams + 64
    settings = {
        "MAX_CONCURRENT_REQUESTS": str(room),
        "MAX_CONNECTIONS": str(2 * room),
        "MAX_NUM_SEQS": str(min(room, 4096)),
        "MAX_NUM_BATCHED_TOKENS": str(max(room, 4096)),
        "TARGET_TTFT_MS": "0",
        "MAX_STEP_MS": "0",
        "MODEL": arguments.model,
    }
    with served(settings) as server:
        port = int(server.url.rpartition(":")[2])
        rows = asyncio.run(measure(server, port, arguments.streams, arguments.steps))
        left = forgotten_s(server.url)
    print("| idle streams | private memory of the web process, MiB | seconds to open them |\n| --- | --- | --- |")
    for count, memory, took in rows:
        print(f"| {count} | {memory:.1f} | {took:.1f} |")
    slope = statistics.linear_regression([row[0] for row in rows], [row[1] for row in rows]).slope
    print(f"\n{slope * 1024:.1f} KiB a stream; all were forgotten {left:.1f} s after their clients left")


if __name__ == "__main__":
    main()
