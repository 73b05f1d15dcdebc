"""Measures the engine's products and its attention on one core, the former beside torch's (oneDNN, or MKL in float32).

    python -m tools.bench.products [--hidden 576] [--wide 3072] [--rows 1 8 32 128 1024] [--rounds 9] [--dtype bfloat16]

Rates are 10^9 operations a second of the thread's CPU time, so that other processes disturb them little; the best of the rounds, in
which the contestants take turns. Attention is causal, over prompts of 1,024 and 4,096 tokens with heads of 64 in groups of three, and
counts the products with keys that a query sees. The share is that of the fastest rate in the table.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F

from engine.cpu.kernels import paged
from engine.cpu.layers import PanelLinear
from engine.cpu.spaced_rows import spaced_rows

HEADS, KV_HEADS, DIM, BLOCK = 9, 3, 64, 16
PROMPTS = (1024, 4096)
OPERATIONS = 2e8
"""Of one turn at least, so that the clock's steps do not matter."""


def rates(works: dict[str, Callable[[], object]], operations: int, rounds: int) -> dict[str, float]:
    """The best rate of each piece of work; all do the same number of operations."""
    repeats, best = max(1, round(OPERATIONS / operations)), dict.fromkeys(works, float("inf"))
    for _ in range(rounds + 1):  # the first one also compiles
        for name, work in works.items():
            begun = time.thread_time()
            for _ in range(repeats):
                work()
            best[name] = min(best[name], time.thread_time() - begun)
    return {name: operations * repeats / seconds / 1e9 for name, seconds in best.items()}


def products(rows: int, inner: int, outputs: int, rounds: int, dtype: torch.dtype) -> dict[str, float]:
    """Ours and torch's rate of x [rows, inner] times a weight [outputs, inner]; torch asks oneDNN, in float32 also MKL."""
    weight, x = torch.randn(outputs, inner, dtype=dtype), torch.randn(rows, inner, dtype=dtype)
    layer = PanelLinear(weight, None, [])
    own, out = spaced_rows(rows, inner, dtype), spaced_rows(rows, layer.width, dtype)
    own.copy_(x)
    works = {"ours": lambda: layer.rows(own, out), "torch": lambda: F.linear(x, weight)}
    return rates(works, 2 * rows * inner * outputs, rounds)


def attention(tokens: int, rounds: int) -> float:
    """The rate of a prompt's attention."""
    blocks = tokens // BLOCK
    keys, values = (
        torch.randn(blocks, KV_HEADS, DIM, BLOCK).bfloat16(),
        torch.randn(blocks, KV_HEADS, BLOCK, DIM).bfloat16(),
    )
    query, out = torch.randn(HEADS, tokens, DIM).bfloat16(), torch.empty(tokens, HEADS, DIM, dtype=torch.bfloat16)
    plan = paged.AttentionPlan([(0, tokens, tokens, range(blocks))], BLOCK, BLOCK, tokens, blocks)
    work = {"": lambda: paged.attend(plan, query, keys, values, out, None, None, None, None)}
    return rates(work, 4 * DIM * HEADS * tokens * (tokens + 1) // 2, rounds)[""]


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hidden", type=int, default=576)
    parser.add_argument("--wide", type=int, default=3072)
    parser.add_argument("--rows", nargs="+", type=int, default=[1, 8, 32, 128, 1024])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], default="bfloat16", help="of the products")
    arguments = parser.parse_args()
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    torch.set_num_threads(1)
    found = {
        f"product of {rows} rows": products(
            rows, arguments.hidden, arguments.wide, arguments.rounds, getattr(torch, arguments.dtype)
        )
        for rows in arguments.rows
    }
    found |= {f"attention of {tokens} tokens": {"ours": attention(tokens, arguments.rounds)} for tokens in PROMPTS}
    fastest = max(rate for each in found.values() for rate in each.values())
    print("| work | ours | torch | to torch | share |\n| --- | --- | --- | --- | --- |")
    for name, each in found.items():
        ours, other = each["ours"], each.get("torch")
        beside = f"{other:.0f} | {ours / other:.2f}" if other else "|"
        print(f"| {name} | {ours:.0f} | {beside} | {ours / fastest:.2f} |")


if __name__ == "__main__":
    main()
