"""Measures the cost of adapters: streams of the base model, of one adapter and of several, in turn on one engine.

    python -m tools.bench.adapters [--model smollm2-135m] [--adapters 8] [--rank 16] [--streams 8 32] [--rounds 3]

It also measures the cost of loading for running streams: the longest inter-token gap while new adapters are loaded, as a
ratio to the median gap.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import tempfile
import time
from pathlib import Path

from engine.client import EngineClient
from engine.messages import AdapterRef
from engine.sampling.params import SamplingParams
from tests.models.adapters import make_adapter
from tests.models.random_models import make_model
from tools.bench.server import engine_worker, prompts


async def run(
    client: EngineClient, work: list[list[int]], tokens: int, refs: list[AdapterRef | None]
) -> list[tuple[float, float]]:
    """When each token of each stream but the first came, and the gap before it, in seconds."""
    gaps: list[tuple[float, float]] = []

    async def one(prompt: list[int], ref: AdapterRef | None) -> None:
        params = SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True)
        previous = 0.0
        async for output in client.generate(prompt, params, adapter=ref):
            if output.error is not None:
                raise RuntimeError(f"a stream failed: {output.error}")
            now = time.perf_counter()
            if previous:
                gaps.append((now, now - previous))
            previous = now

    await asyncio.gather(*(one(prompt, refs[i % len(refs)]) for i, prompt in enumerate(work)))
    return gaps


async def measure(model: Path, folder: Path, options: argparse.Namespace) -> None:
    """In turn; medians of the rounds."""
    refs = [make_adapter(model, folder / f"a{i}", options.rank, i) for i in range(options.adapters)]
    cases: dict[str, list[AdapterRef | None]] = {
        "base": [None],
        "1 adapter": [refs[0]],
        f"{len(refs)} adapters": [*refs],
    }
    with engine_worker(model, options.dtype) as config:
        client = EngineClient(config.address, config.worker_id, config.epoch)
        await client.connect()
        await run(client, prompts(len(refs), 16, 0), 4, [*refs])  # loads them
        print("| streams | case | tok/s | ratio to the base model |\n| --- | --- | --- | --- |", flush=True)
        for streams in options.streams:
            found: dict[str, list[float]] = {name: [] for name in cases}
            for number in range(options.rounds):
                names = [*cases][number % 3 :] + [*cases][: number % 3]
                for name in names:
                    start = time.perf_counter()
                    work = prompts(streams, 128, seed=1000 * streams + 10 * number + names.index(name))
                    await run(client, work, 128, cases[name])
                    found[name].append(streams * 128 / (time.perf_counter() - start))
            for name, speeds in found.items():
                ratio = statistics.median(s / b for s, b in zip(speeds, found["base"], strict=True))
                print(f"| {streams} | {name} | {statistics.median(speeds):.1f} | {ratio:.2f} |", flush=True)
        late = [make_adapter(model, folder / f"late{i}", options.rank, 100 + i) for i in range(5)]
        running = asyncio.ensure_future(run(client, prompts(8, 128, 77), 256, [None]))
        await asyncio.sleep(1.5)  # past the prompts
        begin = time.perf_counter()
        for ref in late:
            failure = await client.command("load", ref)
            if failure is not None:
                raise RuntimeError(f"an adapter was not loaded: {failure}")
            await asyncio.sleep(0.4)
        gaps = sorted(gap for when, gap in await running if when - gap > begin)
        median = statistics.median(gaps)
        print(f"loading 5 adapters under 8 streams: median gap {median * 1e3:.1f} ms, "
              f"longest {gaps[-1] * 1e3:.1f} ms, ratio {gaps[-1] / median:.2f}")  # fmt: skip
        await client.close()


def main() -> None:
    """Measure what was asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m", help="A random model to make.")
    parser.add_argument("--adapters", type=int, default=8)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--streams", nargs="+", type=int, default=[8, 32])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--dtype", default="auto")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="dragoman-bench-") as folder:
        asyncio.run(measure(make_model(Path(folder), options.model), Path(folder) / "adapters", options))


if __name__ == "__main__":
    main()
