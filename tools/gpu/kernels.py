"""Measures products of few rows on a CUDA device, and what adapters add to them, beside torch's (cuBLAS) and the time to read the weight.

    python -m tools.bench.gpu_products [--rows 1 32] [--adapters 0 1 8]

Each is captured in a graph, over as many copies of the weight as do not fit into the device's cache; the best of five replays. The factors of
adapters, of rank 16 in eight slots of 64, stay in the cache. The shapes are those of Qwen2.5's 0.5B and 7B models. It needs only what
`engine/` needs.
"""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F

from engine.gpu import int8, low_rank, products
from tools.bench.gpu import bandwidth

if TYPE_CHECKING:
    from collections.abc import Callable

SHAPES = {
    "0.5B qkv": ([896, 1024, 1152], 896), "0.5B out": ([896], 896), "0.5B gate and up": ([4864, 9728], 896),
    "0.5B down": ([896], 4864), "0.5B head": ([151936], 896), "7B qkv": ([3584, 4096, 4608], 3584), "7B out": ([3584], 3584),
    "7B gate and up": ([18944, 37888], 3584), "7B down": ([3584], 18944), "7B head": ([152064], 3584),
}  # fmt: skip
"""Where the outputs of each combined layer end, and the inputs."""
LEAST_CAPTURED, REPLAYS = 12, 5
CACHE_BYTES = 200_000_000
SLOTS, CAPACITY, RANK = 8, 64, 16


def microseconds(run: Callable[[int], object], copies: int = 1) -> float:
    """Of one call; `run` takes the call's number, of which each of so many copies has at least one."""
    captured = max(LEAST_CAPTURED, copies)
    run(0)
    torch.cuda.synchronize()
    graph, times = torch.cuda.CUDAGraph(), []
    with torch.cuda.graph(graph):
        for number in range(captured):
            run(number)
    for _ in range(REPLAYS):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end) / captured * 1e3)
    return min(times)


def products_of(columns: int, inner: int, rows: int, rate: float) -> list[str]:
    """Microseconds of reading the weight, torch's product, and this engine's, in bfloat16; the last two in int8."""
    copies = max(2, CACHE_BYTES // (columns * inner * 2))
    x = torch.randn(rows, inner, device="cuda", dtype=torch.bfloat16)
    weights = [torch.randn(columns, inner, device="cuda", dtype=torch.bfloat16) for _ in range(copies)]
    found = [
        columns * inner * 2 / rate * 1e6,
        microseconds(lambda number: F.linear(x, weights[number % copies]), copies),
        microseconds(lambda number: products.product(x, weights[number % copies], None, None), copies),
    ]
    taken = "ours" if products.pays(weights[0]) else "torch's"
    narrow = [weight.mul(30).clamp(-127, 127).to(torch.int8) for weight in weights]
    scales = torch.ones(columns, device="cuda")
    found.append(microseconds(lambda number: int8.product(x, narrow[number % copies], scales, None), copies))
    return [*(f"{each:.1f}" for each in found), taken]


def adapters_of(ends: list[int], inner: int, rows: int, adapters: int) -> float:
    """Microseconds that so many adapters take, in turn over the rows."""
    x = torch.randn(rows, inner, device="cuda", dtype=torch.bfloat16)
    a = torch.randn(len(ends) * SLOTS * CAPACITY, inner, device="cuda", dtype=torch.bfloat16)
    b = torch.randn(SLOTS * CAPACITY, ends[-1], device="cuda", dtype=torch.bfloat16)
    ranks = torch.full((SLOTS,), RANK, dtype=torch.int32, device="cuda")
    slots = torch.arange(rows, device="cuda") % adapters if adapters else torch.full((rows,), SLOTS, device="cuda")
    out = torch.zeros(rows, ends[-1], device="cuda", dtype=torch.bfloat16)
    return microseconds(lambda number: low_rank.add(x, a, b, slots, ranks, ends, out))


def main() -> None:
    """Print a table, or say that there is nothing to measure on."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", nargs="+", type=int, default=[1, 32])
    parser.add_argument("--adapters", nargs="+", type=int, default=[0, 1, 8])
    options = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("tools.bench.gpu_products: torch finds no CUDA device here")
    rate = bandwidth()
    print(f"{torch.cuda.get_device_name()}: {rate / 1e12:.2f} TB/s measured; microseconds")
    adapters = " | ".join(f"{count} adapters" for count in options.adapters)
    print(f"| product | rows | reading the weight | torch | ours | ours, int8 | taken | {adapters} |")
    print(f"| --- | --- | --- | --- | --- | --- | --- |{' --- |' * len(options.adapters)}", flush=True)
    for name, (ends, inner) in SHAPES.items():
        for rows in options.rows:
            added = [f"{adapters_of(ends, inner, rows, count):.1f}" for count in options.adapters]
            cells = [name, str(rows), *products_of(ends[-1], inner, rows, rate), *added]
            print(f"| {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
