"""Measures the host's part of a decode step on a device: the engine over a device that computes nothing.

    TRITON_INTERPRET=1 python -m tools.gpu.host [--streams 1 32 128 256] [--context 1024] [--steps 200] [--profile]

Scheduling, the batch's tensors, the buffers of the captured graphs, greedy sampling, reading and publishing are those
of a CUDA device, over CPU tensors. A graph's replay does nothing, so what is left is Python and torch's part on the
host. Copies and launches on a real device are not in it.
"""

from __future__ import annotations

import argparse
import cProfile
import os
import pstats
import statistics
import tempfile
import time
from pathlib import Path

import torch

from engine.config import EngineConfig
from engine.core import EngineCore
from engine.messages import Submit
from engine.sampling.params import SamplingParams
from tests.models.random_models import make_model
from tools.gpu.null import VOCAB, NullBackend


def decode_steps(core: EngineCore, streams: int, context: int, steps: int, params: SamplingParams) -> list[float]:
    """Seconds of each step in which all sequences decode."""
    generator = torch.Generator().manual_seed(streams)
    for number in range(streams):
        prompt = torch.randint(10, VOCAB, (context,), generator=generator).tolist()
        if core.submit(1, Submit(number, prompt, params)) is not None:
            raise SystemExit("a sequence was refused")
    times: list[float] = []
    while core.has_work:
        before, start = core.stats.decode_steps, time.perf_counter()
        core.step()
        if core.stats.decode_steps > before and len(core.scheduler.running) == streams:
            times.append(time.perf_counter() - start)
    return times[2 : steps - 2]


def main() -> None:
    """One row for each number of streams."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", nargs="+", type=int, default=[1, 32, 128, 256])
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--profile", action="store_true", help="where the time goes with the most streams")
    options = parser.parse_args()
    if os.environ.get("TRITON_INTERPRET") != "1":
        raise SystemExit("tools.gpu.host: set TRITON_INTERPRET=1, because the model is proven without a device")
    params = SamplingParams(max_tokens=options.steps, temperature=0.0, ignore_eos=True)
    with tempfile.TemporaryDirectory() as folder:
        length = options.context + options.steps + 16
        model = make_model(Path(folder), "qwen2", vocab_size=VOCAB, max_position_embeddings=length)
        blocks = max(options.streams) * length // 16 + 16
        config = EngineConfig(
            model=str(model),
            dtype="float32",
            max_num_seqs=max(options.streams),
            speculative_tokens=0,
            max_num_batched_tokens=8192,
            threads=1,
            kv_cache_bytes=blocks * 16 * 768,  # 16 tokens of this model's keys and values
        )
        core = EngineCore(config, NullBackend(config, torch.device("cpu")))
        print("| streams | ms a step, median | p90 |\n| --- | --- | --- |", flush=True)
        for streams in options.streams:
            decode_steps(core, streams, options.context, 20, params)
            times = decode_steps(core, streams, options.context, options.steps, params)
            p90 = statistics.quantiles(times, n=10)[-1]
            print(f"| {streams} | {statistics.median(times) * 1e3:.3f} | {p90 * 1e3:.3f} |", flush=True)
        if options.profile:
            with cProfile.Profile() as profile:
                decode_steps(core, max(options.streams), options.context, options.steps, params)
            pstats.Stats(profile).sort_stats("tottime").print_stats(30)
        core.close()


if __name__ == "__main__":
    main()
