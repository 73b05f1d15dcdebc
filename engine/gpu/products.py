"""Products of few rows with a weight on the device: each weight is read once, at the memory's speed, by as many programs as fill the device.

A weight of few outputs has too few tiles for that, so its inputs are split as well (split-K). The last program of a tile to end adds up the
parts, always in the same order. The number of rows changes neither the tiles nor their order, so a row of 16-bit numbers gets the same result
beside any others, up to MOST_ROWS. Weights are 16-bit numbers or signed bytes with a scale for each output.
"""

from __future__ import annotations

from functools import cache

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import nn

from engine.gpu.paged_attention import OVERHEAD_BYTES, shared_memory

TILES = (16, 32, 64)
"""Rows of a tile: the fewest that hold a step's rows."""
MOST_ROWS = TILES[-1]
"""Up to these rows reading the weight takes longer than multiplying."""
COLUMNS = 64
"""Outputs of a tile: the rows of the matrix units' instruction, which takes the weight as its first operand."""
TURN = 128
"""Inputs per iteration of the inner loop."""
STAGES = (3, 2)
"""Triton's stages of its loads: the first that fits into a device's shared memory is taken."""
PROGRAMS = {1: 4.0, 2: 2.25, 4: 2.25}
"""The most programs for each of the device's multiprocessors where inputs are split, by the bytes of a weight."""
LEAST_TURNS = 2
"""The fewest iterations of a part."""


@triton.jit(do_not_specialize=["rows"])  # each number of rows would be compiled anew
def _product(
    x, weight, scales, bias, out, parts, ended, rows, columns, inner, part_inner, x_row, weight_row, out_row,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, TURN: tl.constexpr, PARTS: tl.constexpr, EVEN: tl.constexpr,
    HAS_SCALES: tl.constexpr, HAS_BIAS: tl.constexpr,
):  # fmt: skip
    """One part of the inputs for one tile: some of the weight's outputs times some rows of x."""
    tile, part, row_tile = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    column = tile * COLUMNS + tl.arange(0, COLUMNS)
    row = row_tile * ROWS + tl.arange(0, ROWS)
    # Beyond the ends the last ones are read again: masks would make the loads slower, and nothing of them is stored.
    weight_at = weight + tl.minimum(column, columns - 1).to(tl.int64)[:, None] * weight_row
    x_at = x + tl.minimum(row, rows - 1)[None, :] * x_row
    sums = tl.zeros([COLUMNS, ROWS], tl.float32)
    low = part * part_inner
    for begin in range(low, tl.minimum(low + part_inner, inner), TURN):
        i = begin + tl.arange(0, TURN)
        if EVEN:
            w = tl.load(weight_at + i[None, :])
            given = tl.load(x_at + i[:, None])
        else:
            w = tl.load(weight_at + i[None, :], mask=(i < inner)[None, :], other=0)
            given = tl.load(x_at + i[:, None], mask=(i < inner)[:, None], other=0.0)
        sums = tl.dot(w.to(given.dtype), given, sums, input_precision="ieee")
    if PARTS > 1:
        number = row_tile * tl.num_programs(0) + tile
        place = parts + number.to(tl.int64) * (PARTS * COLUMNS * ROWS)
        place = place + tl.arange(0, COLUMNS)[:, None] * ROWS + tl.arange(0, ROWS)[None, :]
        tl.store(place + part * (COLUMNS * ROWS), sums)
        tl.debug_barrier()  # all threads have written before one says so
        if tl.atomic_add(ended + number, 1, sem="acq_rel") < PARTS - 1:
            return
        sums = tl.zeros([COLUMNS, ROWS], tl.float32)
        for other in tl.static_range(PARTS):
            sums += tl.load(place + other * (COLUMNS * ROWS), cache_modifier=".cg")
        tl.store(ended + number, 0)
    if HAS_SCALES:
        sums *= tl.load(scales + column, mask=column < columns, other=0.0)[:, None]
    if HAS_BIAS:
        sums += tl.load(bias + column, mask=column < columns, other=0.0).to(tl.float32)[:, None]
    ok = (column < columns)[:, None] & (row < rows)[None, :]
    tl.store(out + row[None, :] * out_row + column[:, None], sums, mask=ok)


@cache
def multiprocessors(device: torch.device) -> int:
    """Those of the device; of the CPU, in Triton's interpreter, as many as a large device has."""
    return 132 if device.type != "cuda" else int(torch.cuda.get_device_properties(device).multi_processor_count)


def parts_of(weight: torch.Tensor, row_tiles: int) -> tuple[int, int]:
    """The number of parts of the inputs, and the inputs of each but the last, for a weight [out, in] and so many tiles of rows."""
    columns, inner = weight.shape
    turns = -(-inner // TURN)
    most = int(PROGRAMS[weight.itemsize] * multiprocessors(weight.device)) // (-(-columns // COLUMNS) * row_tiles)
    turns_each = -(-turns // max(1, min(most, turns // LEAST_TURNS)))
    return -(-turns // turns_each), turns_each * TURN


@cache
def _workspace(device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """The parts' sums of all tiles of any one product, float32, and how many parts of each tile have ended, int32: zeros between products.
    Products of one device follow each other, on one stream.
    """
    programs = int(max(PROGRAMS.values()) * multiprocessors(device))
    sums = torch.empty(programs * COLUMNS * MOST_ROWS, device=device)
    return sums, torch.zeros(programs, dtype=torch.int32, device=device)


def stages_of(choices: tuple[int, ...], bytes_each: int, room: int | None) -> int:
    """The first of Triton's stages, of `bytes_each` bytes of tiles, that fits into a device's shared memory; the last one if none does."""
    return next((n for n in choices if room is None or n * bytes_each + OVERHEAD_BYTES <= room), choices[-1])


def product(
    x: torch.Tensor, weight: torch.Tensor, scales: torch.Tensor | None, bias: torch.Tensor | None
) -> torch.Tensor:
    """X [T, in] times the transpose of weight [out, in] and of scales [out] float32, plus bias [out], in the type of x.

    The weight is of that type, without scales, or int8. More than MOST_ROWS rows make several passes over the weight.
    """
    rows, (columns, inner) = x.shape[0], weight.shape
    if x.stride(1) != 1:
        x = x.contiguous()
    out = x.new_empty(rows, columns)
    # Without matrix units, which multiply no float32, the sums of more rows would not fit into registers.
    tile = TILES[0] if x.dtype == torch.float32 else next((n for n in TILES if rows <= n), MOST_ROWS)
    row_tiles = -(-rows // tile)
    parts, part_inner = parts_of(weight, row_tiles)
    sums, ended = _workspace(x.device)
    bytes_each = (COLUMNS * weight.itemsize + tile * x.itemsize) * TURN
    _product[(-(-columns // COLUMNS), parts, row_tiles)](
        x, weight, weight if scales is None else scales, weight if bias is None else bias, out, sums, ended,
        rows, columns, inner, part_inner, x.stride(0), weight.stride(0), out.stride(0),
        ROWS=tile, COLUMNS=COLUMNS, TURN=TURN, PARTS=parts, EVEN=inner % TURN == 0,
        HAS_SCALES=scales is not None, HAS_BIAS=bias is not None,
        num_stages=stages_of(STAGES, bytes_each, shared_memory(x.device)),
    )  # fmt: skip
    return out


def pays(weight: torch.Tensor) -> bool:
    """Whether this file's product of few rows takes less time than torch's, which it does not for weights of few outputs and few inputs:
    adding up the parts takes 2 microseconds (measured on an H100).
    """
    columns, inner = weight.shape
    enough: bool = -(-columns // COLUMNS) >= multiprocessors(weight.device) or inner >= 2 * columns
    return enough and weight.device.type == "cuda" and weight.itemsize == 2


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """X [T, in] times the transpose of weight [out, in], plus bias [out]: by this file's product or torch's, whichever takes less time."""
    if len(x) <= MOST_ROWS and pays(weight):
        return product(x, weight, None, bias)
    return F.linear(x, weight, bias)


class FewRowsLinear(nn.Linear):
    """A linear layer whose products of few rows are those of this file, where they take less time."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """[T, in] -> [T, out]."""
        return linear(input, self.weight, self.bias)
