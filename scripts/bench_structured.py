"""Measures the cost of structured output: streams of free text and streams with grammars, in turn on one engine.

    python -m scripts.bench_structured [--model smollm2-135m] [--streams 8] [--rounds 3] [--threads 0]

No grammar ends within the requested tokens, so all streams have the same length.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import tempfile
import time
from pathlib import Path

from engine.client import EngineClient
from engine.sampling.params import Grammar, SamplingParams
from scripts.bench import engine_worker, prompts
from scripts.random_models import DEMO, make_model

ITEM = {
    "type": "object",
    "properties": {"id": {"type": "integer"}, "name": {"type": "string"}},
    "required": ["id", "name"],
}
CASES: dict[str, Grammar | None] = {
    "free": None,
    "schema": Grammar("json_schema", json.dumps({"type": "array", "items": ITEM, "minItems": 500})),
    "regex": Grammar("regex", "([a-z]{2,9} ){500}"),
}
TOKENS = 128


async def speed(client: EngineClient, work: list[list[int]], grammar: Grammar | None) -> float:
    """Output tokens per second."""

    async def one(number: int, prompt: list[int]) -> int:
        params = SamplingParams(max_tokens=TOKENS, temperature=1.0, seed=number, ignore_eos=True, grammar=grammar)
        return sum([len(output.token_ids) async for output in client.generate(prompt, params)])

    start = time.perf_counter()
    tokens = sum(await asyncio.gather(*(one(number, prompt) for number, prompt in enumerate(work))))
    return tokens / (time.perf_counter() - start)


async def measure(model: Path, options: argparse.Namespace) -> None:
    """In turn; medians of the rounds."""
    with engine_worker(model, options.dtype, options.threads) as config:
        client = EngineClient(config.address, config.worker_id, config.epoch)
        await client.connect()
        found: dict[str, list[float]] = {name: [] for name in CASES}
        for number in range(options.rounds + 1):
            for name in [*CASES][number % 3 :] + [*CASES][: number % 3]:
                result = await speed(client, prompts(options.streams, 128, 10 * number + len(name)), CASES[name])
                if number:  # the first round compiles
                    found[name].append(result)
        print("| streams | case | tok/s | ratio to free text |\n| --- | --- | --- | --- |")
        for name, speeds in found.items():
            ratio = statistics.median(s / f for s, f in zip(speeds, found["free"], strict=True))
            print(f"| {options.streams} | {name} | {statistics.median(speeds):.1f} | {ratio:.2f} |")
        await client.close()


def main() -> None:
    """Measure what was asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m", help="A random model to make, or `demo`.")
    parser.add_argument("--streams", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--dtype", default="auto")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="dragoman-bench-") as folder:
        model = DEMO if options.model == "demo" else make_model(Path(folder), options.model)
        asyncio.run(measure(model, options))


if __name__ == "__main__":
    main()
