"""Times the CPU's sampler alone: a token for each of 32 rows of logits of a vocabulary of 151,936, by ways to sample.

    python -m scripts.bench_sampling [--rows 32] [--vocabulary 151936] [--threads 0]

Of each row 40 tokens are likely. A request has a prompt of 400 tokens and 100 tokens of output. The median of 20 steps, on one thread
of torch, as the worker has it, and with the kernels' own threads.
"""

from __future__ import annotations

import argparse
import statistics
import time

import torch

from engine.cpu.kernels.threads import set_num_threads
from engine.request import Request
from engine.sampling.params import SamplingParams
from engine.sampling.sampler import Sampler

LIKELY, PROMPT, OUTPUT, STEPS = 40, 400, 100, 20
WAYS = {
    "greedy": SamplingParams(999, temperature=0.0),
    "temperature": SamplingParams(999, temperature=0.8),
    "top-k 50 and top-p 0.9": SamplingParams(999, temperature=0.8, top_k=50, top_p=0.9),
    "top-p 0.9": SamplingParams(999, temperature=0.8, top_p=0.9),
    "greedy, repetition penalty": SamplingParams(999, temperature=0.0, repetition_penalty=1.1),
    "greedy, frequency and presence penalty": SamplingParams(
        999, temperature=0.0, frequency_penalty=0.5, presence_penalty=0.1
    ),
    "greedy, log-probability": SamplingParams(999, temperature=0.0, logprobs=0),
    "greedy, log-probabilities of 5": SamplingParams(999, temperature=0.0, logprobs=5),
    "top-k 50 and top-p 0.9, log-probability as of TGI": SamplingParams(
        999, temperature=0.8, top_k=50, top_p=0.9, logprobs=0, logprobs_mode="processed"
    ),
}


def logits_of(rows: int, vocabulary: int) -> torch.Tensor:
    """[rows, vocabulary] float32."""
    generator = torch.Generator().manual_seed(0)
    made = torch.randn(rows, vocabulary, generator=generator)
    likely = torch.randint(0, vocabulary, (rows, LIKELY), generator=generator)
    made[torch.arange(rows)[:, None], likely] += torch.rand(rows, LIKELY, generator=generator) * 12
    return made


def seconds(params: SamplingParams, logits: torch.Tensor) -> float:
    """Of one step."""
    generator = torch.Generator().manual_seed(1)
    asked = []
    for number in range(len(logits)):
        tokens = torch.randint(0, logits.shape[1], (PROMPT + OUTPUT,), generator=generator).tolist()
        asked.append((Request((0, number), tokens[:PROMPT], params, 0.0), 0))
        asked[-1][0].token_ids += tokens[PROMPT:]
    sampler, times = Sampler([2]), []
    for _ in range(STEPS):
        step = logits.clone()
        begin = time.perf_counter()
        sampler.sample(asked, step)
        times.append(time.perf_counter() - begin)
    return statistics.median(times)


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--vocabulary", type=int, default=151936)
    parser.add_argument("--threads", type=int, default=0, help="of the kernels; 0: all cores")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.threads:
        set_num_threads(options.threads)
    logits = logits_of(options.rows, options.vocabulary)
    print("| way | ms a step |\n| --- | --- |", flush=True)
    for name, params in WAYS.items():
        print(f"| {name} | {seconds(params, logits) * 1e3:.1f} |", flush=True)


if __name__ == "__main__":
    main()
