"""The parts `products`, `attention` and `adapters`: single kernels, beside torch's and the time to read what they
read.

Each is captured in a graph over as many copies of its weights as do not fit into the device's cache. The shapes are
those of Qwen2.5's 0.5B and 7B models. The factors of adapters, of rank 16 in eight slots of 64, stay in the cache.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F

from engine.gpu import int8, low_rank, paged_attention, products
from tools.gpu.results import Figure
from tools.gpu.timing import copy_rate, microseconds

if TYPE_CHECKING:
    from collections.abc import Callable

    from tools.gpu.part import Run

SHAPES = {
    "0.5B qkv": ([896, 1024, 1152], 896), "0.5B out": ([896], 896), "0.5B gate and up": ([4864, 9728], 896),
    "0.5B down": ([896], 4864), "0.5B head": ([151936], 896), "7B qkv": ([3584, 4096, 4608], 3584), "7B out": ([3584], 3584),
    "7B gate and up": ([18944, 37888], 3584), "7B down": ([3584], 18944), "7B head": ([152064], 3584),
}  # fmt: skip
"""Where the outputs of each combined layer end, and the inputs."""
HEADS = {"0.5B": (14, 2, 64), "1B": (32, 8, 64), "7B": (28, 4, 128)}
"""Query heads, KV heads and their dim."""
TINY_SHAPES, TINY_HEADS = {"tiny qkv": ([64, 96, 128], 64)}, {"tiny": (4, 2, 16)}
ROWS, CONTEXTS = (1, 8, 32), (160, 1024, 4096)
CACHE_BYTES = 200_000_000
SLOTS, CAPACITY, RANK, BLOCK = 8, 64, 16, 16


def run(run: Run) -> None:
    """The part's kernels."""
    {"products": run_products, "attention": run_attention, "adapters": run_adapters}[run.argument](run)


def dtype_of(run: Run) -> torch.dtype:
    """Triton's interpreter has no bfloat16."""
    return torch.float32 if run.dry else torch.bfloat16


def figures(row: str, column: int, found: dict[str, float], reading: float | None = None) -> list[Figure]:
    """Times in microseconds; `reading` is that of what a kernel reads, but int8 weights, which are half of it."""
    made = []
    for name, value in found.items():
        share = None if reading is None else reading / value / (2 if name == "int8" else 1)
        made.append(Figure(row=f"{row}, {name}", unit="µs", value=value, column=column, share=share))
    return made


def run_products(run: Run) -> None:
    """Products of few rows: torch's, this engine's, with int8 weights, and reading the weight once."""
    rate = functools.cache(lambda: copy_rate(run.device))
    for name, (ends, inner) in (TINY_SHAPES if run.dry else SHAPES).items():
        for rows in ROWS:
            work = functools.partial(product_figures, run, name, ends[-1], inner, rows, rate)
            run.measure(f"{name}, {rows} rows", work)


def product_figures(
    run: Run, name: str, columns: int, inner: int, rows: int, rate: Callable[[], float]
) -> list[Figure]:
    """Of one shape and one number of rows."""
    dtype, device = dtype_of(run), run.device
    copies = 2 if run.dry else max(2, CACHE_BYTES // (columns * inner * 2))
    x = torch.randn(rows, inner, device=device, dtype=dtype)
    weights = [torch.randn(columns, inner, device=device, dtype=dtype) for _ in range(copies)]
    narrow = [weight.mul(30).clamp(-127, 127).to(torch.int8) for weight in weights]
    scales = torch.ones(columns, device=device)
    works: dict[str, Callable[[int], object]] = {
        "torch": lambda number: F.linear(x, weights[number % copies]),
        "ours": lambda number: products.product(x, weights[number % copies], None, None),
        "int8": lambda number: int8.product(x, narrow[number % copies], scales, None),
    }
    found = {kind: microseconds(work, device, copies) for kind, work in works.items()}
    taken = "" if products.pays(weights[0]) else " (torch serves)"
    return figures(f"{name}{taken}", rows, found, columns * inner * dtype.itemsize / rate() * 1e6)


def run_attention(run: Run) -> None:
    """One query of each sequence over its context."""
    rate = functools.cache(lambda: copy_rate(run.device))
    for name, (heads, kv_heads, dim) in (TINY_HEADS if run.dry else HEADS).items():
        for context in CONTEXTS[:1] if run.dry else CONTEXTS:
            for sequences in ROWS[:2] if run.dry else ROWS:
                shape = (heads, kv_heads, dim)
                work = functools.partial(attention_figures, run, name, shape, context, sequences, rate)
                run.measure(f"{name}, context {context}, {sequences} sequences", work)


def attention_figures(
    run: Run, name: str, shape: tuple[int, int, int], context: int, sequences: int, rate: Callable[[], float]
) -> list[Figure]:
    """Of one shape, over layers that do not fit into the device's cache together."""
    (heads, kv_heads, dim), dtype, device = shape, dtype_of(run), run.device
    blocks, split_keys = -(-context // BLOCK), paged_attention.keys_of_split(context)
    splits = -(-context // split_keys)
    layer_bytes = 2 * sequences * blocks * BLOCK * kv_heads * dim * dtype.itemsize
    layers = 1 if run.dry else max(2, CACHE_BYTES // layer_bytes)
    sizes = (sequences * blocks, BLOCK, kv_heads, dim)
    caches = [tuple(torch.randn(sizes, device=device, dtype=dtype) for _ in range(2)) for _ in range(layers)]
    order = torch.randperm(sequences * blocks, generator=torch.Generator().manual_seed(0))
    tables = order.view(sequences, blocks).to(torch.int32).to(device)
    group, room = heads // kv_heads, paged_attention.shared_memory(device)
    tile_rows = paged_attention.tile_rows(group, 1, dtype, room)
    whole, starts = paged_attention.tiles([1] * sequences, group, tile_rows)
    numbers = [torch.tensor(each, dtype=torch.int32, device=device) for each in (whole, starts)]
    queries = torch.arange(sequences + 1, dtype=torch.int32, device=device)
    lengths = torch.full((sequences,), context, dtype=torch.int32, device=device)
    plan = paged_attention.Plan(numbers[0], numbers[1], tile_rows, queries, lengths, tables, splits, split_keys)
    query = torch.randn(sequences, heads, dim, device=device, dtype=dtype)
    out = torch.empty_like(query)
    parts = paged_attention.Parts.of(sequences, heads, splits, dim, device) if splits > 1 else None

    def attend(number: int) -> None:
        keys, values = caches[number % layers]
        paged_attention.attend(plan, query, keys, values, None, None, None, None, out, parts)

    found = {"ours": microseconds(attend, device, layers)}
    return figures(f"{name}, context {context}", sequences, found, layer_bytes / rate() * 1e6)


def run_adapters(run: Run) -> None:
    """What adapters add to a product, in turn over the rows."""
    for name, (ends, inner) in (TINY_SHAPES if run.dry else SHAPES).items():
        for rows in ROWS[:2] if run.dry else ROWS:
            work = functools.partial(adapter_figures, run, name, ends, inner, rows)
            run.measure(f"{name}, {rows} rows", work)


def adapter_figures(run: Run, name: str, ends: list[int], inner: int, rows: int) -> list[Figure]:
    """Without any, with one and with eight."""
    dtype, device, found = dtype_of(run), run.device, {}
    x = torch.randn(rows, inner, device=device, dtype=dtype)
    a = torch.randn(len(ends) * SLOTS * CAPACITY, inner, device=device, dtype=dtype)
    b = torch.randn(SLOTS * CAPACITY, ends[-1], device=device, dtype=dtype)
    ranks = torch.full((SLOTS,), RANK, dtype=torch.int32, device=device)
    out = torch.zeros(rows, ends[-1], device=device, dtype=dtype)
    for count in (0, 1, SLOTS):
        slots = torch.arange(rows, device=device) % count if count else torch.full((rows,), SLOTS, device=device)

        def work(number: int, slots: torch.Tensor = slots) -> None:
            low_rank.add(x, a, b, slots, ranks, ends, out)

        found[f"{count} adapters"] = microseconds(work, device)
    return figures(name, rows, found)
