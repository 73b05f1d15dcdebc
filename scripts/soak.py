"""Runs mixed load for minutes, then checks an idle server: flat memory, every block free, every gauge zero.

    python -m scripts.soak [--minutes 10]

Users stream, send single requests, disconnect in every phase, stop reading, and send bad bodies. The resident memory of the
web process and of the worker is sampled every second; the slope is Theil-Sen's over the second half. Exits with 1 if a
check fails.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import re
import statistics
import sys
import time
import urllib.request
from collections import Counter
from itertools import combinations
from urllib.parse import urlsplit

import psutil

from loadtests.server import running_server

MAX_SLOPE_MIB_PER_MIN = 1.0
BAD_BODIES = [b"{", b"[]", b"\xff", b'{"prompt": 5}', b'{"inputs": null}', b"[" * 5000, b'{"prompt": "x", "n": 0}', b""]


class User:
    """One client that does one thing after another until the time is over."""

    def __init__(self, port: int, seed: int, counts: Counter[str]) -> None:
        self.port, self.rng, self.counts = port, random.Random(seed), counts

    async def run(self, until: float) -> None:
        """Pick a behaviour, again and again."""
        kinds = [self.whole, self.stream, self.hang_up, self.deaf, self.bad]
        while time.monotonic() < until:
            kind = self.rng.choices(kinds, [4, 6, 4, 1, 2])[0]
            try:
                await asyncio.wait_for(kind(), 120)
                self.counts[kind.__name__] += 1
            except (OSError, asyncio.IncompleteReadError) as error:
                self.counts[f"{kind.__name__}: {type(error).__name__}"] += 1

    def request(self, stream: bool) -> bytes:
        """A POST of one of the dialects."""
        words = " ".join(
            self.rng.choice(["river", "stone", "garden", "lamp", "story", "key", "boat"])
            for _ in range(self.rng.randrange(1, 120))
        )
        tokens = self.rng.randrange(1, 80)
        if self.rng.random() < 0.5:
            body = {"inputs": words, "parameters": {"max_new_tokens": tokens, "do_sample": True}}
            path = "/generate_stream" if stream else "/generate"
        else:
            body = {
                "model": self.rng.choice(["demo", "json", "pirate"]),
                "prompt": words,
                "max_tokens": tokens,
                "stream": stream,
                "n": self.rng.choice([1, 1, 2]),
                "logprobs": 2,
            }
            path = "/v1/completions"
        return self.raw(path, json.dumps(body).encode())

    @staticmethod
    def raw(path: str, content: bytes) -> bytes:
        """Bytes of a POST on a connection of its own."""
        head = f"POST {path} HTTP/1.1\r\nhost: soak\r\nconnection: close\r\ncontent-length: {len(content)}\r\n\r\n"
        return head.encode() + content

    async def exchange(self, request: bytes) -> bytes:
        """Send and read to the end."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        writer.write(request)
        answer = await reader.read()
        writer.close()
        self.counts[f"status {answer[9:12].decode()}"] += 1
        return answer

    async def whole(self) -> None:
        """An answer at once."""
        await self.exchange(self.request(stream=False))

    async def stream(self) -> None:
        """A stream to its end."""
        await self.exchange(self.request(stream=True))

    async def bad(self) -> None:
        """A body that must be refused."""
        path = self.rng.choice(["/v1/completions", "/v1/chat/completions", "/generate", "/"])
        answer = await self.exchange(self.raw(path, self.rng.choice(BAD_BODIES)))
        if not answer.startswith(b"HTTP/1.1 4"):
            self.counts["NOT REFUSED"] += 1

    async def hang_up(self) -> None:
        """Leave at any moment."""
        _, writer = await asyncio.open_connection("127.0.0.1", self.port)
        writer.write(self.request(stream=self.rng.random() < 0.5))
        await asyncio.sleep(self.rng.random() * 1.5)
        writer.transport.abort()

    async def deaf(self) -> None:
        """Ask for much and read nothing for a while."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port, limit=1024)
        reader._transport.pause_reading()  # type: ignore[attr-defined]
        body = {"prompt": "Once", "max_tokens": 400, "n": 4, "logprobs": 20, "stream": True, "ignore_eos": True}
        writer.write(self.raw("/v1/completions", json.dumps(body).encode()))
        await asyncio.sleep(5)
        writer.transport.abort()


def slope(samples: list[tuple[float, float]]) -> float:
    """Theil-Sen: the median of all pairs' slopes, of at most 200 samples."""
    step = max(1, len(samples) // 200)
    pairs = combinations(samples[::step], 2)
    return statistics.median((y2 - y1) / (x2 - x1) for (x1, y1), (x2, y2) in pairs)


async def sample(processes: dict[str, psutil.Process], until: float) -> dict[str, list[tuple[float, float]]]:
    """(minutes, MiB) of each process, once a second."""
    series: dict[str, list[tuple[float, float]]] = {name: [] for name in processes}
    start = time.monotonic()
    while time.monotonic() < until:
        for name, process in processes.items():
            series[name].append(((time.monotonic() - start) / 60, process.memory_info().rss / 2**20))
        await asyncio.sleep(1)
    return series


async def soak(
    port: int, minutes: float, processes: dict[str, psutil.Process]
) -> tuple[dict[str, float], Counter[str]]:
    """Load and samples; slopes in MiB per minute over the second half."""
    counts: Counter[str] = Counter()
    until = time.monotonic() + minutes * 60
    users = [User(port, seed, counts).run(until) for seed in range(12)]
    series, *_ = await asyncio.gather(sample(processes, until), *users)
    for name, values in series.items():
        print(
            f"{name}: {values[0][1]:.0f} MiB at the start, {values[len(values) // 2][1]:.0f} half-way, {values[-1][1]:.0f} at the end"
        )
    return {name: slope(values[len(values) // 2 :]) for name, values in series.items()}, counts


def gauges(url: str) -> dict[str, float]:
    """What must be zero when nothing runs."""
    with urllib.request.urlopen(f"{url}/metrics", timeout=10) as page:
        text = page.read().decode()
    names = "vllm:num_requests_running|vllm:num_requests_waiting|vllm:kv_cache_usage_perc|tgi_queue_size|tgi_batch_current_size"
    return {m[1]: float(m[2]) for m in re.finditer(rf"^({names})(?:{{.*}})? (\S+)$", text, re.M)}


def main() -> int:
    """Run, wait, judge."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=10)
    options = parser.parse_args()
    with running_server({}) as url:
        server = next(child for child in psutil.Process().children() if "serve" in child.cmdline())
        worker = next(child for child in server.children() if "engine" in child.cmdline())
        slopes, counts = asyncio.run(soak(urlsplit(url).port or 0, options.minutes, {"web": server, "worker": worker}))
        time.sleep(5)
        left = gauges(url)
    print("behaviours:", dict(sorted(counts.items())))
    for name, value in slopes.items():
        print(f"{name}: slope {value:+.2f} MiB/min over the second half (at most {MAX_SLOPE_MIB_PER_MIN})")
    print("gauges afterwards:", left)
    bad = any(value > MAX_SLOPE_MIB_PER_MIN for value in slopes.values()) or any(left.values()) or counts["NOT REFUSED"]
    return 1 if bad or any(name.startswith("status 5") for name in counts) else 0


if __name__ == "__main__":
    sys.exit(main())
