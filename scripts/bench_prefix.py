"""Measures the prefix cache: eight requests with one long prefix and an end of their own.

    python -m scripts.bench_prefix [--models smollm2-135m qwen2.5-0.5b] [--prefix 1000] [--tail 16] [--rounds 3]

The figure is the time of the prefill steps. The requests come one after the other, and then, with another prefix, one
first and seven at once.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from pathlib import Path

from engine.config import EngineConfig
from engine.core import EngineCore
from engine.failures import words
from engine.messages import Submit
from engine.sampling.params import SamplingParams
from scripts.bench import prompts
from scripts.random_models import make_model

FOLLOWERS = 7


class Driver:
    """Submits prompts that end with their first token, and tells what their prefill took."""

    def __init__(self, model: Path) -> None:
        self.core, self.number = EngineCore(EngineConfig(model=str(model))), 0

    def seconds(self, work: list[list[int]]) -> float:
        """All at once."""
        before = self.core.stats.prefill_s
        for prompt in work:
            self.number += 1
            refusal = self.core.submit(1, Submit(self.number, prompt, SamplingParams(max_tokens=1, temperature=0.0)))
            if refusal is not None:
                raise RuntimeError(words(refusal.error))
        while self.core.has_work:
            self.core.step()
        return self.core.stats.prefill_s - before


def main() -> None:
    """Measure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=["smollm2-135m", "qwen2.5-0.5b"])
    parser.add_argument("--prefix", type=int, default=1000)
    parser.add_argument("--tail", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    print("| model | first, ms | next, one by one, ms | share of the first | seven at once, ms each | share |")
    print("| --- | --- | --- | --- | --- | --- |", flush=True)
    with tempfile.TemporaryDirectory(prefix="dragoman-bench-") as folder:
        for name in options.models:
            driver = Driver(make_model(Path(folder), name))
            driver.seconds(prompts(1, 600, seed=0))
            first, each, together = [], [], []
            for number in range(options.rounds):
                tails = prompts(2 * FOLLOWERS + 2, options.tail, seed=100 + number)
                for half in range(2):
                    prefix = prompts(1, options.prefix, seed=10 * number + half + 1)[0]
                    mine = [prefix + tail for tail in tails[half::2]]
                    first.append(driver.seconds(mine[:1]) * 1e3)
                    if half:
                        together.append(driver.seconds(mine[1:]) * 1e3 / FOLLOWERS)
                    else:
                        each += [driver.seconds([prompt]) * 1e3 for prompt in mine[1:]]
            whole, one, seven = (statistics.median(times) for times in (first, each, together))
            print(
                f"| {name} | {whole:.0f} | {one:.1f} | {one / whole:.3f} | {seven:.1f} | {seven / whole:.3f} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
