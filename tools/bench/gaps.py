"""Measures what prompts that join do to the streams beside them, for several settings of `max_step_ms` in turn.

    python -m tools.bench.gaps [--model smollm2-135m ...] [--step-ms 0 150] [--rounds 3] [--rate 0.5]

Each setting has a worker of its own; the workers take turns within a round. Two loads:

- `joins`: four streams decode while prompts of 256, 1024 and 4096 tokens join them.
- `open`: 18 requests arrive at random times (`--rate` a second), with prompts of 64 to 2048 tokens and outputs of 16 to 128.

The table has medians over rounds: the longest gap and the 95th percentile of the gaps between a stream's tokens, the time to
the first token of those that join, tokens per second of all (prompt and output), and how many of the requests of `open` had
their first token within 2 s and no gap over `--limit-ms`.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import random
import statistics
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from engine.client import EngineClient
from engine.sampling.params import SamplingParams
from tests.models.random_models import DEMO, make_model
from tools.bench.server import engine_worker, machine, prompts

if TYPE_CHECKING:
    from engine.config import EngineConfig

JOINING = (256, 1024, 4096, 1024, 256)
STREAMS, STREAM_TOKENS = 4, 400
FIRST_S = 2.0


@dataclass
class Request:
    """One request, as its client saw it. Times in seconds."""

    prompt: list[int]
    tokens: int
    sent: float = 0.0
    times: list[float] = field(default_factory=list)
    begun: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def ttft(self) -> float:
        return self.times[0] - self.sent

    @property
    def gaps(self) -> list[float]:
        return [later - earlier for earlier, later in itertools.pairwise(self.times)]

    async def run(self, client: EngineClient, delay_s: float = 0.0) -> Request:
        """Send it after `delay_s`, and read the answer."""
        await asyncio.sleep(delay_s)
        self.sent = time.perf_counter()
        params = SamplingParams(max_tokens=self.tokens, temperature=0.0, ignore_eos=True)
        async for _ in client.generate(self.prompt, params):
            self.times.append(time.perf_counter())
            self.begun.set()
        return self


@dataclass
class Figures:
    """The figures of one run."""

    longest_ms: float
    p95_ms: float
    ttft_p50_ms: float
    ttft_worst_ms: float
    tokens_per_s: float
    good: int
    requests: int


def figures(streams: list[Request], joining: list[Request], elapsed_s: float, limit_s: float) -> Figures:
    """Gaps are those of `streams`, first tokens those of `joining`; `good` counts both."""
    gaps = sorted(gap for one in streams for gap in one.gaps)
    everyone = list({id(one): one for one in [*streams, *joining]}.values())
    tokens = sum(len(one.prompt) + len(one.times) for one in everyone)
    good = sum(one.ttft <= FIRST_S and max(one.gaps, default=0.0) <= limit_s for one in everyone)
    first = [one.ttft * 1e3 for one in joining]
    return Figures(
        gaps[-1] * 1e3, gaps[int(0.95 * len(gaps))] * 1e3, statistics.median(first), max(first), tokens / elapsed_s, good,
        len(everyone),
    )  # fmt: skip


async def joins(client: EngineClient, seed: int, options: argparse.Namespace) -> Figures:
    """Streams, and prompts that join them one after another."""
    start = time.perf_counter()
    streams = [Request(prompt, STREAM_TOKENS) for prompt in prompts(STREAMS, 64, seed)]
    running = [asyncio.create_task(one.run(client)) for one in streams]
    for one in streams:
        await one.begun.wait()
    joining = [Request(prompts(1, length, seed + 100 + i)[0], 8) for i, length in enumerate(JOINING)]
    for one in joining:
        await one.run(client)
    await asyncio.gather(*running)
    return figures(streams, joining, time.perf_counter() - start, options.limit_ms / 1e3)


async def arrivals(client: EngineClient, seed: int, options: argparse.Namespace) -> Figures:
    """An open loop: requests come when they come."""
    rng = random.Random(seed)
    requests, delay, work = [], 0.0, []
    for number in range(18):
        one = Request(prompts(1, 64 << (number % 6), seed + number)[0], 16 << (number * 5 % 4))
        requests.append(one)
        work.append(one.run(client, delay))
        delay += rng.expovariate(options.rate)
    start = time.perf_counter()
    await asyncio.gather(*work)
    return figures(requests, requests, time.perf_counter() - start, options.limit_ms / 1e3)


LOADS = {"joins": joins, "open": arrivals}


async def compare(
    configs: dict[int, EngineConfig], options: argparse.Namespace
) -> dict[tuple[str, int], list[Figures]]:
    """The runs of each load and setting."""
    found: dict[tuple[str, int], list[Figures]] = {}
    clients = {}
    for step_ms, config in configs.items():
        clients[step_ms] = EngineClient(config.address, config.worker_id, config.epoch)
        await clients[step_ms].connect()
        await Request(prompts(1, 600, 0)[0], 8).run(clients[step_ms])
    for round_, (name, load) in itertools.product(range(options.rounds), LOADS.items()):
        settings = list(clients)
        for step_ms in settings[round_ % len(settings) :] + settings[: round_ % len(settings)]:
            run = await load(clients[step_ms], 1000 * round_ + options.seed, options)
            found.setdefault((name, step_ms), []).append(run)
    for client in clients.values():
        await client.close()
    return found


def main() -> None:
    """Measure what was asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", nargs="+", default=["smollm2-135m"], help="Random models to make, or `demo`.")
    parser.add_argument("--step-ms", nargs="+", type=int, default=[0, 150])
    parser.add_argument("--limit-ms", type=float, default=150.0)
    parser.add_argument("--rate", type=float, default=0.5)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--dtype", default="auto")
    options = parser.parse_args()
    print(machine())
    print(
        "| model | load | max_step_ms | longest gap ms | p95 gap ms | TTFT p50 / worst ms | tokens/s | "
        f"within {FIRST_S:.0f} s and {options.limit_ms:.0f} ms |"
    )
    print("| --- | --- | --- | --- | --- | --- | --- | --- |", flush=True)
    for name in options.model:
        with tempfile.TemporaryDirectory(prefix="dragoman-bench-") as folder, contextlib.ExitStack() as stack:
            model = DEMO if name == "demo" else make_model(Path(folder), name)
            workers = {
                step_ms: stack.enter_context(
                    engine_worker(model, options.dtype, max_step_ms=step_ms, prefix_caching=False)
                )
                for step_ms in options.step_ms
            }
            for (load, step_ms), runs in sorted(asyncio.run(compare(workers, options)).items()):
                middle = {key: statistics.median(vars(run)[key] for run in runs) for key in vars(runs[0])}
                print(
                    f"| {name} | {load} | {step_ms or 'none'} | {middle['longest_ms']:.0f} | {middle['p95_ms']:.0f} "
                    f"| {middle['ttft_p50_ms']:.0f} / {middle['ttft_worst_ms']:.0f} | {middle['tokens_per_s']:.0f} "
                    f"| {middle['good']:.0f} of {middle['requests']:.0f} |",
                    flush=True,
                )


if __name__ == "__main__":
    main()
