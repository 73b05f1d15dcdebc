"""Times the steps of an engine in this process, without sockets or HTTP: decoding at several widths, and prompts.

    python -m tools.bench.step [--model smollm2-135m] [--quantizations none int8] [--streams 1 8 32] [--dtype auto]
        [--weight-coding auto]

Decoding: the median of 60 steps after prompts of 128 tokens. Prompts: four of 1,024 tokens together, and one of 4,096; the best of
three.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path

from engine.config import EngineConfig
from engine.core import EngineCore
from engine.messages import Submit
from engine.sampling.params import SamplingParams
from tests.models.random_models import make_model
from tools.bench.server import prompts

STEPS, PROMPT = 60, 128
PROMPTS = ((4, 1024), (1, 4096))


def submit(engine: EngineCore, work: list[list[int]], tokens: int) -> None:
    """Submit sequences that do not end before their number of tokens."""
    for number, prompt in enumerate(work):
        params = SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True)
        if engine.submit(1, Submit(number, prompt, params)) is not None:
            raise SystemExit("a sequence was refused")


def run_prompts(engine: EngineCore, count: int) -> float:
    """Seconds until each of `count` sequences has its first token."""
    start, begun = time.perf_counter(), set()
    while len(begun) < count:
        begun |= {output.request_id for output in engine.step().get(1, [])}
    return time.perf_counter() - start


def finish(engine: EngineCore) -> None:
    """Let the sequences end."""
    while engine.has_work:
        engine.step()


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m", help="a random model to make")
    parser.add_argument("--quantizations", nargs="+", default=["none", "int8"])
    parser.add_argument("--dtype", default="auto", choices=["auto", "bfloat16", "float32"])
    parser.add_argument("--weight-coding", default="auto", choices=["auto", "on", "off"])
    parser.add_argument("--streams", nargs="+", type=int, default=[1, 8, 32])
    arguments = parser.parse_args()
    print("| quantization | work | ms |\n| --- | --- | --- |")
    with tempfile.TemporaryDirectory() as folder:
        model = make_model(Path(folder), arguments.model)
        for quantization in arguments.quantizations:
            config = EngineConfig(
                model=str(model),
                dtype=arguments.dtype,
                quantization=quantization,
                weight_coding=arguments.weight_coding,
                speculative_tokens=0,
                max_step_ms=0,
            )
            engine = EngineCore(config)
            for streams in arguments.streams:
                submit(engine, prompts(streams, PROMPT, seed=streams), STEPS + 20)
                run_prompts(engine, streams)
                times = []
                for _ in range(STEPS):
                    start = time.perf_counter()
                    engine.step()
                    times.append(time.perf_counter() - start)
                finish(engine)
                print(
                    f"| {quantization} | step of {streams} streams | {statistics.median(times) * 1e3:.1f} |", flush=True
                )
            for count, length in PROMPTS:
                taken = []
                for seed in range(3):
                    submit(engine, prompts(count, length, seed=100 + seed), 2)
                    taken.append(run_prompts(engine, count))
                    finish(engine)
                print(f"| {quantization} | {count} prompts of {length} tokens | {min(taken) * 1e3:.0f} |", flush=True)
            engine.close()


if __name__ == "__main__":
    main()
