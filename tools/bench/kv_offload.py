"""Compares a prefix that comes back from the KV offload with one that is computed again.

    python -m tools.bench.kv_offload [--models smollm2-135m qwen2.5-0.5b] [--lengths 500 2000] [--rounds 5] [--cold]

The figure is the time from submitting a prompt to its first token: computed, and returned from the tier after a restart of the engine. Rounds
alternate between the two, with prompts of their own. `--cold` asks the system to forget the files first, so that the disk is
read and not the page cache.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from pathlib import Path

from engine.config import EngineConfig
from engine.core import EngineCore
from engine.failures import words
from engine.messages import Submit
from engine.sampling.params import SamplingParams
from tests.models.random_models import make_model
from tools.bench.server import prompts

DISK_BYTES = 16 << 30


class Driver:
    """Submits prompts that end with their first token, and tells what that took and how many tokens were cached."""

    def __init__(self, model: Path, folder: Path) -> None:
        options = {"kv_offload_disk_bytes": DISK_BYTES, "kv_offload_dir": str(folder)}
        self.core, self.number = EngineCore(EngineConfig(model=str(model), **options)), 0

    def seconds(self, prompt: list[int]) -> tuple[float, int]:
        """Until the first token."""
        self.number += 1
        begin = time.perf_counter()
        refusal = self.core.submit(1, Submit(self.number, prompt, SamplingParams(max_tokens=1, temperature=0.0)))
        if refusal is not None:
            raise RuntimeError(words(refusal.error))
        outputs = []
        while self.core.has_work:
            outputs += self.core.step().get(1, [])
        return time.perf_counter() - begin, outputs[0].cached_tokens or 0


def forget(folder: Path) -> None:
    """Ask the system to drop the files' pages from its cache."""
    os.sync()
    for path in folder.glob("*/*/*"):
        with path.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def main() -> None:
    """Measure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=["smollm2-135m", "qwen2.5-0.5b"])
    parser.add_argument("--lengths", nargs="+", type=int, default=[500, 2000])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--cold", action="store_true")
    options = parser.parse_args()
    print("| model | tokens | computed, ms | returned, ms | share | tokens that came back | MB on disk |")
    print("| --- | --- | --- | --- | --- | --- | --- |", flush=True)
    with tempfile.TemporaryDirectory(prefix="dragoman-bench-") as temporary:
        for name in options.models:
            model = make_model(Path(temporary), name)
            for length in options.lengths:
                folder = Path(temporary) / f"{name}-{length}"
                asked = prompts(2 * options.rounds + 1, length, seed=length)
                before = Driver(model, folder)
                for prompt in asked[: options.rounds + 1]:
                    before.seconds(prompt)
                before.core.close()  # writes what is waiting
                if options.cold:
                    forget(folder)
                after = Driver(model, folder)
                after.seconds(asked[options.rounds])  # the first of a process
                returned, computed = [], []
                for old, new in zip(asked[: options.rounds], asked[options.rounds + 1 :], strict=True):
                    returned.append(after.seconds(old))
                    computed.append(after.seconds(new)[0] * 1e3)
                size = sum(path.stat().st_size for path in folder.glob("*/*/*")) / 1e6
                after.core.close()
                back, alone = statistics.median(s * 1e3 for s, _ in returned), statistics.median(computed)
                cached = statistics.median(tokens for _, tokens in returned)
                print(
                    f"| {name} | {length} | {alone:.0f} | {back:.1f} | {back / alone:.3f} | {cached:.0f} | {size:.0f} |",
                    flush=True,
                )


if __name__ == "__main__":
    main()
