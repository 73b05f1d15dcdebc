"""Measures a server under several times its load: answers per second, and how fast it refuses the rest.

    python -m tools.bench.overload [--times 5] [--seconds 20] [--places 128] [--url http://127.0.0.1:8000]

First one client per permit, each sending the next request after its answer. Then `--times` as many clients at once, which
retry a second after a refusal. Every request has its own connection; the time of a refusal is from connecting to the last
byte.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import time
from collections import Counter
from contextlib import nullcontext
from dataclasses import dataclass, field
from urllib.parse import urlsplit

from loadtests.server import running_server

TOKENS = 8
BODY = json.dumps({"prompt": "Once upon a time", "max_tokens": TOKENS, "ignore_eos": True, "temperature": 0}).encode()
HEAD = f"POST /v1/completions HTTP/1.1\r\nhost: bench\r\nconnection: close\r\ncontent-length: {len(BODY)}\r\n\r\n"
LATER = 60.0
"""Seconds after which a request counts as lost."""
PATIENCE_S = 1.0


@dataclass(slots=True)
class Outcome:
    """All requests of one run."""

    statuses: Counter[str] = field(default_factory=Counter)
    refusals_ms: list[float] = field(default_factory=list)
    told_when: int = 0

    async def ask(self, host: str, port: int) -> bool:
        """One request on its own connection; whether it was answered."""
        begin = time.perf_counter()
        try:
            async with asyncio.timeout(LATER):
                reader, writer = await asyncio.open_connection(host, port)
                writer.write(HEAD.encode() + BODY)
                answer = await reader.read()
                writer.close()
        except (OSError, TimeoutError) as error:
            self.statuses[type(error).__name__] += 1
            return False
        status = answer[9:12].decode() or "closed"
        self.statuses[status] += 1
        if status in ("429", "503"):
            self.refusals_ms.append((time.perf_counter() - begin) * 1e3)
            self.told_when += b"\r\nretry-after-ms:" in answer.lower()
        return status == "200"

    def quantile(self, share: float) -> float:
        """Of the refusals' times, in milliseconds."""
        times = sorted(self.refusals_ms)
        return times[min(len(times) - 1, int(share * len(times)))] if times else 0.0


async def crowd(host: str, port: int, clients: int, seconds: float) -> tuple[Outcome, float]:
    """So many clients that begin at once, and the answers a second that they get together."""
    outcome, begin = Outcome(), time.perf_counter()

    async def client() -> None:
        while time.perf_counter() < begin + seconds:
            if not await outcome.ask(host, port):
                await asyncio.sleep(PATIENCE_S)

    await asyncio.gather(*(client() for _ in range(clients)))
    return outcome, outcome.statuses["200"] / (time.perf_counter() - begin)


async def measure(url: str, places: int, times: float, seconds: float) -> None:
    """Both runs, and the table."""
    parts = urlsplit(url)
    host, port = parts.hostname or "127.0.0.1", parts.port or 80
    await crowd(host, port, places, 1)
    _, most = await crowd(host, port, places, seconds)
    outcome, goodput = await crowd(host, port, round(times * places), seconds)
    refused = len(outcome.refusals_ms)
    print("| load | answers/s | goodput | refused | p50 ms | p99 ms | most ms | with retry-after-ms | other |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- | --- |")
    print(f"| 1x, {places} clients | {most:.1f} | | | | | | | |")
    other = {name: n for name, n in outcome.statuses.items() if name not in ("200", "429", "503")}
    cells = [
        f"{goodput:.1f}",
        f"{goodput / most:.0%}",
        str(refused),
        *(f"{outcome.quantile(q):.0f}" for q in (0.5, 0.99, 1)),
    ]
    print(f"| {times:g}x | {' | '.join(cells)} | {outcome.told_when} | {other or ''} |")


def main() -> None:
    """With the demo model in a server of its own, or against one that runs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--times", type=float, default=5)
    parser.add_argument("--seconds", type=float, default=20)
    parser.add_argument("--places", type=int, default=128)
    parser.add_argument("--url", default="")
    options = parser.parse_args()
    settings = {"MAX_CONCURRENT_REQUESTS": str(options.places)}
    with nullcontext(options.url) if options.url else running_server(settings) as url:
        asyncio.run(measure(url, options.places, options.times, options.seconds))


if __name__ == "__main__":
    main()
