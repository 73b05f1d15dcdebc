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
from pathlib import Path

import torch

from engine.config import EngineConfig
from engine.core import EngineCore
from tests.models.random_models import make_model
from tools.gpu.null import VOCAB, NullBackend
from tools.gpu.steps import drive, prompts_of


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
            prompts = prompts_of(streams, options.context, seed=streams)
            drive(core, prompts, options.steps)
            times = drive(core, prompts, options.steps).steps_s[2:-2]
            p90 = statistics.quantiles(times, n=10)[-1]
            print(f"| {streams} | {statistics.median(times) * 1e3:.3f} | {p90 * 1e3:.3f} |", flush=True)
        if options.profile:
            with cProfile.Profile() as profile:
                drive(core, prompts_of(max(options.streams), options.context, seed=0), options.steps)
            pstats.Stats(profile).sort_stats("tottime").print_stats(30)
        core.close()


if __name__ == "__main__":
    main()
