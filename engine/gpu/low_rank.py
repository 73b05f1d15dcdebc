"""What adapters add to the results of a layer, for steps of few rows: the rows of each adapter are multiplied by its two factors alone.

Two kernels, shrink and expand as in Punica (arXiv 2310.18547): x A, in parts of the inputs, and what that times B adds to the outputs. Each
program serves one slot, so an adapter's factors are read once for all of its rows. Slots that no row has, and ranks that an adapter does
not have, cost a look.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from engine.gpu.paged_attention import shared_memory
from engine.gpu.products import stages_of

MOST_ROWS = 256
"""Up to these rows reading only the factors that a step needs is cheaper than the products with all slots' factors."""
FEW, MANY = 16, 64
"""Rows of a tile: for steps of so few rows, and for others. Without matrix units, which multiply no float32, more than FEW would not fit into
registers.
"""
RANKS = 16
"""Ranks that one program multiplies: the fewest that the matrix units support."""
TURN = 128
"""Inputs per iteration of the inner loop."""
PART_INNER, MOST_PARTS = 512, 16
"""The fewest inputs of a part, and the most parts."""
COLUMNS = 128
"""Outputs that one program computes."""
STAGES = (4, 3, 2)
"""Triton's stages of the inner loop's loads: the first that fits into a device's shared memory is taken."""


@triton.jit(do_not_specialize=["rows"])  # each number of rows would be compiled anew
def _shrink(
    x, a, row_slots, ranks, low, rows, slots, inner, part_inner, x_row, a_row,
    ROWS: tl.constexpr, RANK: tl.constexpr, LAYERS: tl.constexpr, PARTS: tl.constexpr, RANKS: tl.constexpr, TURN: tl.constexpr,
):  # fmt: skip
    """Some ranks of one slot, for one of the combined layers and one part of the inputs."""
    layer, part = tl.program_id(0) // PARTS, tl.program_id(0) % PARTS
    slot, rank = tl.program_id(1), tl.program_id(2) * RANKS
    if rank >= tl.load(ranks + slot):
        return
    r = rank + tl.arange(0, RANKS)
    a_at = a + ((layer * slots + slot) * RANK + r).to(tl.int64)[None, :] * a_row
    low_inner = part * part_inner
    high_inner = tl.minimum(low_inner + part_inner, inner)
    for first in range(0, rows, ROWS):
        row = first + tl.arange(0, ROWS)
        mine = tl.load(row_slots + row, mask=row < rows, other=-1) == slot
        if tl.max(mine.to(tl.int32), 0) > 0:
            x_at = x + row.to(tl.int64)[:, None] * x_row
            sums = tl.zeros([ROWS, RANKS], tl.float32)
            for begin in range(low_inner, high_inner, TURN):
                i = begin + tl.arange(0, TURN)
                given = tl.load(x_at + i[None, :], mask=mine[:, None] & (i < high_inner)[None, :], other=0.0)
                factors = tl.load(a_at + i[:, None], mask=(r < RANK)[None, :] & (i < high_inner)[:, None], other=0.0)
                sums = tl.dot(given, factors, sums, input_precision="ieee")
            low_at = low + ((row * LAYERS + layer) * PARTS + part)[:, None] * RANK + r[None, :]
            tl.store(low_at, sums, mask=mine[:, None] & (r < RANK)[None, :])


@triton.jit(do_not_specialize=["rows"])
def _expand(
    low, b, row_slots, ranks, out, rows, end_0, end_1, end_2, b_row, out_row,
    ROWS: tl.constexpr, RANK: tl.constexpr, LAYERS: tl.constexpr, PARTS: tl.constexpr, RANKS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Some outputs of one of the combined layers, for the rows of one slot."""
    block, slot = tl.program_id(0), tl.program_id(1)
    most = tl.load(ranks + slot)
    if most == 0:
        return
    # Each layer's outputs begin with a block of their own.
    blocks_0 = tl.cdiv(end_0, COLUMNS)
    blocks_1 = blocks_0 + tl.cdiv(end_1 - end_0, COLUMNS)
    layer = (block >= blocks_0).to(tl.int32) + (block >= blocks_1).to(tl.int32)
    start = tl.where(layer == 0, 0, tl.where(layer == 1, end_0, end_1))
    end = tl.where(layer == 0, end_0, tl.where(layer == 1, end_1, end_2))
    before = tl.where(layer == 0, 0, tl.where(layer == 1, blocks_0, blocks_1))
    column = start + (block - before) * COLUMNS + tl.arange(0, COLUMNS)
    for first in range(0, rows, ROWS):
        row = first + tl.arange(0, ROWS)
        mine = tl.load(row_slots + row, mask=row < rows, other=-1) == slot
        if tl.max(mine.to(tl.int32), 0) > 0:
            ok = mine[:, None] & (column < end)[None, :]
            out_at = out + row.to(tl.int64)[:, None] * out_row + column[None, :]
            sums = tl.load(out_at, mask=ok, other=0.0).to(tl.float32)
            for rank in range(0, most, RANKS):
                r = rank + tl.arange(0, RANKS)
                low_at = low + (row * LAYERS + layer)[:, None] * (PARTS * RANK) + r[None, :]
                own = tl.zeros([ROWS, RANKS], tl.float32)
                for part in tl.static_range(PARTS):
                    own += tl.load(low_at + part * RANK, mask=mine[:, None] & (r < RANK)[None, :], other=0.0)
                b_at = b + (slot * RANK + r).to(tl.int64)[:, None] * b_row + column[None, :]
                factors = tl.load(b_at, mask=(r < RANK)[:, None] & (column < end)[None, :], other=0.0)
                sums = tl.dot(own.to(factors.dtype), factors, sums, input_precision="ieee")
            tl.store(out_at, sums, mask=ok)


def add(
    x: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    row_slots: torch.Tensor,
    ranks: torch.Tensor,
    ends: list[int],
    out: torch.Tensor,
) -> None:
    """Add to out [T, out] what the rows' adapters make of x [T, in].

    a: [layers * slots * rank, in], by layer, then by slot; b: [slots * rank, out]; where each of the at most three combined layers' outputs
    end: `ends`. row_slots: [T] int64, `slots` for rows without an adapter. ranks: [slots] int32, those that each slot's adapter has.
    """
    (rows, inner), slots, layers = x.shape, len(ranks), len(ends)
    if x.stride(1) != 1:
        x = x.contiguous()
    rank = len(b) // slots
    part_inner = max(PART_INNER, -(-inner // MOST_PARTS // TURN) * TURN)
    parts = -(-inner // part_inner)
    low = torch.empty(rows * layers * parts * rank, device=x.device)
    tile = FEW if rows <= FEW or x.dtype == torch.float32 else MANY
    stages = stages_of(STAGES, (tile + RANKS) * TURN * x.itemsize, shared_memory(x.device))
    _shrink[(layers * parts, slots, -(-rank // RANKS))](
        x, a, row_slots, ranks, low, rows, slots, inner, part_inner, x.stride(0), a.stride(0),
        ROWS=tile, RANK=rank, LAYERS=layers, PARTS=parts, RANKS=RANKS, TURN=TURN, num_stages=stages,
    )  # fmt: skip
    starts = [0, *ends[:-1]]
    blocks = sum(-(-(end - start) // COLUMNS) for start, end in zip(starts, ends, strict=True))
    _expand[(blocks, slots)](
        low, b, row_slots, ranks, out, rows, *(ends + ends[-1:] * 2)[:3], b.stride(0), out.stride(0),
        ROWS=tile, RANK=rank, LAYERS=layers, PARTS=parts, RANKS=RANKS, COLUMNS=COLUMNS,
    )  # fmt: skip
