"""Compiles the device kernels for CUDA architectures without a device, and tells what each needs of one.

    python -m tools.gpu.compiled [--architectures 80 89 90] [--dtypes bfloat16 float32] [--dims 64 128 192/128 256]

A kernel that cannot be compiled, or that takes more shared memory than the architecture has, is an error: exit status
1. It shows nothing of a kernel's results or speed.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from functools import partial
from itertools import product as product_of
from typing import Any

import torch
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import get_ptxas
from triton.runtime import driver

from engine.gpu import int8, layers, low_rank, paged_attention, products

ROOM = {75: 64, 80: 163, 86: 99, 89: 99, 90: 227, 100: 227, 120: 99}
"""KiB of shared memory that a block may take, by compute capability (CUDA C++ Programming Guide, technical
specifications).
"""
HEADS, KV_HEADS, BLOCK_SIZE, BLOCKS, SEQUENCES = 8, 2, 16, 8, 4
HIDDEN, WIDE = 1024, 8192
KERNELS = {"_attention": paged_attention, "_combine": paged_attention, "_product": products, "_widen": int8, "_shrink": low_rank,
           "_expand": low_rank, "_add_norm": layers, "_rotate": layers, "_gate": layers}  # fmt: skip


class NoDevice:
    """What Triton asks a driver for when it compiles."""

    def __init__(self, architecture: int) -> None:
        self._target = GPUTarget("cuda", architecture, 32)

    def get_current_target(self) -> GPUTarget:
        return self._target

    def get_current_device(self) -> int:
        """Triton keeps what it has compiled by device."""
        return int(self._target.arch)

    def get_current_stream(self, device: int | None = None) -> int:
        return 0


class Compiled:
    """Takes a kernel's place: a launch compiles it, with the arguments' own specializations, and keeps the result."""

    def __init__(self, kernel: Any) -> None:
        self._kernel, self.last = kernel, None

    def __getitem__(self, grid: object) -> Any:
        def launch(*arguments: Any, **constants: Any) -> None:
            self.last = self._kernel.warmup(*arguments, grid=grid, **constants)

        return launch


@dataclass(frozen=True, slots=True)
class Needs:
    """What a kernel needs of a device: bytes of shared memory, registers a thread, and bytes of them that are spilled
    to memory.
    """

    shared: int
    registers: int
    spilled: int


def needs(compiled: Any, architecture: int) -> Needs:
    """Read it from the compiler's result, and from what the assembler says."""
    with tempfile.NamedTemporaryFile("w", suffix=".ptx") as file:
        file.write(compiled.asm["ptx"])
        file.flush()
        target = re.search(r"^\.target (\w+)", compiled.asm["ptx"], re.M)
        command = [
            get_ptxas(architecture).path,
            "-v",
            f"-arch={target[1] if target else architecture}",
            file.name,
            "-o",
            "/dev/null",
        ]
        told = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    registers, spilled = re.search(r"Used (\d+) registers", told), re.search(r"(\d+) bytes spill stores", told)
    return Needs(
        int(compiled.metadata.shared), int(registers[1]) if registers else 0, int(spilled[1]) if spilled else 0
    )


def attention(dims: tuple[int, int], dtype: torch.dtype, rows: int, splits: int, options: bool) -> None:
    """Launch attention over chunks of so many rows; `options`: with a window, a soft-cap and sinks."""
    numbers = torch.zeros(SEQUENCES + 1, dtype=torch.int32)
    tables = torch.zeros(SEQUENCES, BLOCKS, dtype=torch.int32)
    room = paged_attention.shared_memory(numbers.device)
    tile_rows = paged_attention.tile_rows(HEADS // KV_HEADS, rows, dtype, room)
    plan = paged_attention.Plan(
        numbers, numbers, tile_rows, numbers, numbers, tables, splits, paged_attention.SPLIT_KEYS
    )
    query = torch.zeros(SEQUENCES * rows, HEADS, dims[0], dtype=dtype)
    keys, values = (torch.zeros(BLOCKS, BLOCK_SIZE, KV_HEADS, dim, dtype=dtype) for dim in dims)
    extra = (64, 30.0, torch.zeros(HEADS, dtype=dtype)) if options else (None, None, None)
    out = query.new_zeros(len(query), HEADS, dims[1])
    parts = paged_attention.Parts.of(len(query), HEADS, splits, dims[1], query.device) if splits > 1 else None
    paged_attention.attend(plan, query, keys, values, None, *extra, out, parts)


def rotation(dim: int, dtype: torch.dtype) -> None:
    """Launch the rotation of a token's heads, with norms."""
    qkv, table = torch.zeros(SEQUENCES, (HEADS + 2 * KV_HEADS) * dim, dtype=dtype), torch.zeros(SEQUENCES, dim)
    keys, values = (torch.zeros(BLOCKS, BLOCK_SIZE, KV_HEADS, dim, dtype=dtype) for _ in range(2))
    norms = (torch.ones(dim), torch.ones(dim), 1e-6)
    slots = torch.zeros(SEQUENCES, dtype=torch.int64)
    layers.rotate_and_store(qkv, (HEADS, KV_HEADS), table, table, norms, slots, keys, values)


def norm(dtype: torch.dtype) -> None:
    """Launch a wide norm."""
    x = torch.zeros(SEQUENCES, WIDE, dtype=dtype)
    layers.add_norm(x.float(), x, torch.ones(WIDE), 1e-6, x.clone(), first=False)


def product(rows: int, out: int, weights: torch.dtype, dtype: torch.dtype) -> None:
    """Launch a product; with few outputs, whose inputs are split."""
    x, weight = torch.zeros(rows, HIDDEN, dtype=dtype), torch.zeros(out, HIDDEN, dtype=weights)
    products.product(x, weight, torch.zeros(out) if weights == torch.int8 else None, torch.zeros(out, dtype=dtype))


def adapters(rows: int, dtype: torch.dtype) -> None:
    """Launch what adapters of rank 32 add, in eight slots."""
    x, out = torch.zeros(rows, HIDDEN, dtype=dtype), torch.zeros(rows, WIDE, dtype=dtype)
    a, b = torch.zeros(3 * 8 * 32, HIDDEN, dtype=dtype), torch.zeros(8 * 32, WIDE, dtype=dtype)
    row_slots, ranks = torch.zeros(rows, dtype=torch.int64), torch.zeros(8, dtype=torch.int32)
    low_rank.add(x, a, b, row_slots, ranks, [WIDE // 2, 3 * WIDE // 4, WIDE], out)


def cases(dims: list[tuple[int, int]], dtypes: list[torch.dtype]) -> dict[tuple[str, str], Any]:
    """Launches by kernel and name."""
    made: dict[tuple[str, str], Any] = {}
    for dtype in dtypes:
        kind = str(dtype).removeprefix("torch.")
        for pair in dims:
            for name, rows, splits, options in (("decode", 1, 1, False), ("split decode", 1, 2, False), ("prefill", 64, 1, False),
                                                ("prefill, all options", 64, 1, True)):  # fmt: skip
                made["_attention", f"{name}, {kind}, {pair[0]}/{pair[1]}"] = partial(
                    attention, pair, dtype, rows, splits, options
                )
            made["_combine", f"pieces, {kind}, {pair[0]}/{pair[1]}"] = partial(attention, pair, dtype, 1, 2, True)
            if pair[0] == pair[1]:
                made["_rotate", f"rotation, {kind}, {pair[0]}"] = partial(rotation, pair[0], dtype)
        for rows, out in ((1, HIDDEN), (products.MOST_ROWS, WIDE)):
            for weights in (dtype, torch.int8):
                name = f"product of {rows} rows, {kind}{' and int8' if weights == torch.int8 else ''}"
                made["_product", name] = partial(product, rows, out, weights, dtype)
        weight = torch.zeros(HIDDEN, HIDDEN, dtype=torch.int8)
        made["_widen", f"widened weight, {kind}"] = partial(int8.widened, weight, torch.zeros(HIDDEN), dtype)
        for name, rows in product_of(("_shrink", "_expand"), (low_rank.FEW, low_rank.MANY)):
            made[name, f"adapters, {name[1:]}, {rows} rows, {kind}"] = partial(adapters, rows, dtype)
        made["_add_norm", f"norm, {kind}"] = partial(norm, dtype)
        made["_gate", f"gate, {kind}"] = partial(layers.gated, torch.zeros(SEQUENCES, 2 * WIDE, dtype=dtype))
    return made


def main() -> int:
    """Print a row for each kernel and architecture."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--architectures", nargs="+", type=int, default=[80, 89, 90], choices=ROOM)
    parser.add_argument(
        "--dtypes", nargs="+", default=["bfloat16", "float32"], choices=["bfloat16", "float16", "float32"]
    )
    parser.add_argument(
        "--dims", nargs="+", default=["64", "128", "192/128", "256"], help="of heads: keys', or keys'/values'"
    )
    options = parser.parse_args()
    dims = [(int(text.partition("/")[0]), int(text.rpartition("/")[2])) for text in options.dims]
    kernels = {name: Compiled(getattr(module, name)) for name, module in KERNELS.items()}
    for name, module in KERNELS.items():
        setattr(module, name, kernels[name])
    failed = 0
    print(
        "| architecture | kernel | shared memory | of | registers | spilled bytes |\n| --- | --- | --- | --- | --- | --- |"
    )
    for architecture in options.architectures:
        driver.set_active(NoDevice(architecture))
        room = ROOM[architecture] * 1024
        paged_attention.shared_memory = products.shared_memory = low_rank.shared_memory = lambda device, room=room: room
        for (kernel, name), launch in cases(dims, [getattr(torch, each) for each in options.dtypes]).items():
            launch()
            found = needs(kernels[kernel].last, architecture)
            failed += found.shared > room
            print(
                f"| {architecture} | {name} | {found.shared} | {room} | {found.registers} | {found.spilled} |",
                flush=True,
            )
    if failed:
        print(f"{failed} kernels need more shared memory than there is", file=sys.stderr)
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
