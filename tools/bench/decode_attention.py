"""Measures how fast attention reads keys and values when sequences decode, beside a product of one row, which reads a weight.

    python -m tools.bench.decode_attention [--streams 32] [--context 220] [--rounds 9]

One new token for each sequence, bfloat16, blocks in no order, over layers that are larger than caches together; all usable CPUs.
Medians of 10^9 bytes a second; the share is that of the product's rate in the same rounds.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import time
from collections.abc import Callable

import torch

from engine.cpu import large_pages
from engine.cpu.kernels import paged
from engine.cpu.kernels.threads import set_num_threads
from engine.cpu.layers import PanelLinear
from engine.cpu.spaced_rows import spaced_rows

BLOCK = 16
SHAPES = {
    "smollm2-135m": (9, 3, 64),
    "qwen2.5-0.5b": (14, 2, 64),
    "qwen3-0.6b": (16, 8, 128),
    "llama-3.2-1b": (32, 8, 64),
}
"""Query heads, KV heads and their dim."""
BYTES = 256 << 20
"""Of all layers' keys and values, and of the product's weight."""


def attention(shape: tuple[int, int, int], streams: int, context: int) -> tuple[Callable[[], None], int]:
    """A turn through all layers, and the bytes of keys and values that it reads."""
    heads, kv_heads, dim = shape
    each = -(-context // BLOCK)
    blocks = list(range(streams * each))
    layer_bytes = 2 * torch.bfloat16.itemsize * len(blocks) * BLOCK * kv_heads * dim  # keys and values
    layers = max(1, BYTES // layer_bytes)
    sizes = (len(blocks), kv_heads, dim, BLOCK), (len(blocks), kv_heads, BLOCK, dim)
    caches = [[large_pages.empty(size, torch.bfloat16).normal_() for size in sizes] for _ in range(layers)]
    random.Random(0).shuffle(blocks)
    sequences = [(row, 1, context, blocks[row * each : (row + 1) * each]) for row in range(streams)]
    plan = paged.AttentionPlan(sequences, BLOCK, BLOCK, streams, len(blocks))
    query = torch.randn(heads, streams, dim).bfloat16()
    out = torch.empty(streams, heads, dim, dtype=torch.bfloat16)

    def turn() -> None:
        for keys, values in caches:
            paged.attend(plan, query, keys, values, out, None, None, None, None)

    return turn, sum(tensor.nbytes for pair in caches for tensor in pair)


def product() -> tuple[Callable[[], None], int]:
    """A product of one row, and the bytes of its weight."""
    layer = PanelLinear(torch.randn(BYTES // 8192, 4096, dtype=torch.bfloat16), None, [])
    x, out = spaced_rows(1, 4096, torch.bfloat16), spaced_rows(1, layer.width, torch.bfloat16)

    def turn() -> None:
        layer.rows(x, out)

    return turn, BYTES


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--context", type=int, default=220, help="tokens of each sequence")
    parser.add_argument("--rounds", type=int, default=9)
    arguments = parser.parse_args()
    set_num_threads(len(os.sched_getaffinity(0)))
    works = {"product": product()}
    works |= {name: attention(shape, arguments.streams, arguments.context) for name, shape in SHAPES.items()}
    rates: dict[str, list[float]] = {name: [] for name in works}
    for turn in range(arguments.rounds + 1):  # the first one also compiles
        for name, (work, size) in works.items():
            begun = time.perf_counter()
            work()
            if turn:
                rates[name].append(size / (time.perf_counter() - begun) / 1e9)
    found = {name: statistics.median(each) for name, each in rates.items()}
    print("| work | GB/s | share |\n| --- | --- | --- |")
    for name, rate in found.items():
        print(f"| {name} | {rate:.1f} | {rate / found['product']:.2f} |")


if __name__ == "__main__":
    main()
