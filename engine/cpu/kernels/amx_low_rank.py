"""The two products of adapters in AMX tiles: rows times A, and what comes of it times B.

A lies in groups of 16 ranks, [groups, inner / 2, 16, 2], B in panels as the weight does. A tile may take in rows of another segment, whose sums
nobody reads: every row of a product depends on itself alone.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from engine.cpu.kernels import amx
from engine.cpu.kernels.amx import LINE, TILE_ROWS, offset
from engine.cpu.kernels.amx_product import release_tiles
from engine.cpu.kernels.amx_room import BLOCK_ROWS, MOST_TILES, ROW_BYTES
from engine.cpu.kernels.compiled import inlined, kernel
from engine.cpu.kernels.emit import BF16, F32, I64, LANES, switch
from engine.cpu.kernels.lora import SEGMENT_BYTES, low_rank_task
from engine.cpu.kernels.simd import address_of, fetch_ahead, load, load_int, reserve, store, take_ticket
from engine.cpu.kernels.tiles import PANEL

GROUP = LANES
"""Ranks of a tile."""
GROUP_STEP = TILE_ROWS * LINE
"""Bytes of a group of ranks that one step multiplies: 16 pairs of inputs."""
AHEAD = 12
"""Steps between a prefetch of A and its use."""
BEGIN_ROOM = (BLOCK_ROWS + TILE_ROWS) * ROW_BYTES
"""Bytes of what adapters add to a block and a panel: the last tile of a segment may run over the block's end."""
_RANKS, _ROWS, _RANKS_LEFT, _ROWS_LEFT = 3, 4, 5, 6
"""Tiles of factors beside up to three of sums: whole steps, and the pairs that fill none."""


@intrinsic
def shape_low_rank(typing_context: Any, rows: Any, left: Any) -> Any:
    """Shape the tiles for tiles of 1 to 16 rows, and sums of whole steps of 16 pairs and of `left` pairs more."""

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        rows, left = args
        depth = builder.select(builder.icmp_signed(">", left, I64(0)), left, I64(1))
        line, whole = I64(LINE), I64(TILE_ROWS)
        sums = [(rows, line)] * MOST_TILES
        amx.shape(builder, [*sums, (whole, line), (rows, line), (depth, line), (rows, builder.mul(depth, I64(4)))])
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), emit


@intrinsic
def multiply_ranks(
    typing_context: Any,
    out: Any, tiles: Any, first: Any, second: Any, third: Any, x_bytes: Any, a: Any, steps: Any, left: Any,
) -> Any:  # fmt: skip
    """Out [tiles * 16, 16] float32 = x times a group of 16 ranks, for one to three tiles of x, whose rows are `x_bytes` apart; `steps` of 16
    pairs and `left` pairs, for which `shape_low_rank` has shaped the tiles.
    """

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        out, tiles, first, second, third, x_bytes, a, steps, left = args

        def block(count: int) -> None:
            places = [first, second, third][:count]

            def multiply(here: Any, pairs_done: Any, ranks: int, rows: int) -> None:
                amx.load(builder, ranks, here, I64(LINE))
                for tile, place in enumerate(places):
                    amx.load(builder, rows, offset(builder, place, pairs_done, 4), x_bytes)
                    amx.add_products(builder, tile, rows, ranks)

            for tile in range(count):
                amx.clear(builder, tile)
            with cgutils.for_range(builder, steps) as step:
                here = offset(builder, a, step.index, GROUP_STEP)
                amx.fetch_lines(builder, builder.add(here, I64(AHEAD * GROUP_STEP)), GROUP_STEP // LINE)
                multiply(here, builder.mul(step.index, I64(TILE_ROWS)), _RANKS, _ROWS)
            with builder.if_then(builder.icmp_signed("!=", left, I64(0))):
                done = builder.mul(steps, I64(TILE_ROWS))
                multiply(offset(builder, a, done, LINE), done, _RANKS_LEFT, _ROWS_LEFT)
            for tile in range(count):
                amx.store(builder, tile, builder.add(out, I64(GROUP_STEP * tile)), I64(LINE))

        switch(builder, tiles, MOST_TILES, block)
        return context.get_dummy_value()

    return types.void(*(types.int64,) * 9), emit


@intrinsic
def expand_tile(
    typing_context: Any,
    out: Any, low: Any, low_bytes: Any, first: Any, second: Any, panel: Any, steps: Any, left: Any, start: Any,
) -> Any:  # fmt: skip
    """Out [16, 32] float32 = start [32] (0: zero) + what 16 rows of `low`, `low_bytes` apart, give with a panel of B: its first 16 columns with the
    ranks from `first` on, the others with those from `second` on. `steps` and `left` as in `multiply_ranks`.
    """

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        out, low, low_bytes, first, second, panel, steps, left, start = args
        with builder.if_else(builder.icmp_signed("!=", start, I64(0))) as (given, none):
            with given:
                for half in range(2):
                    amx.load(builder, half, builder.add(start, I64(LINE * half)), I64(0))
            with none:
                for half in range(2):
                    amx.clear(builder, half)

        def multiply(pairs_done: Any, ranks: int, rows: int) -> None:
            here = offset(builder, panel, pairs_done, ROW_BYTES)
            for half, begin in enumerate((first, second)):
                place = builder.add(offset(builder, low, begin, 2), builder.mul(pairs_done, I64(4)))
                amx.load(builder, rows, place, low_bytes)
                amx.load(builder, ranks, builder.add(here, I64(LINE * half)), I64(ROW_BYTES))
                amx.add_products(builder, half, rows, ranks)

        with cgutils.for_range(builder, steps) as step:
            multiply(builder.mul(step.index, I64(TILE_ROWS)), _RANKS, _ROWS)
        with builder.if_then(builder.icmp_signed("!=", left, I64(0))):
            multiply(builder.mul(steps, I64(TILE_ROWS)), _RANKS_LEFT, _ROWS_LEFT)
        for half in range(2):
            amx.store(builder, half, builder.add(out, I64(LINE * half)), I64(ROW_BYTES))
        return context.get_dummy_value()

    return types.void(*(types.int64,) * 9), emit


@inlined
def begin_block(
    first: int, count: int, begin_panel: int, end_panel: int, segments: int, end_segments: int, low: int, low_stride: int,
    sums: int, ahead_panel: int, panels: int,
) -> None:  # fmt: skip
    """What adapters add to `count` rows from `first` on, at most 48, and to some panels: at `sums`, float32 [panels, 64, 32], of which
    the rows after `count` hold anything. B of the panels from `ahead_panel` on is prefetched, as far as there are `panels`.

    Leaves the tiles in other shapes. A tile's sums may run over those of the next segment's rows, which come later.
    """
    for segment in range(segments, end_segments, SEGMENT_BYTES):
        top, bottom = load_int(segment, 0), load_int(segment, 0) + load_int(segment, 1)
        top, bottom = max(first, top), min(first + count, bottom)
        if top >= bottom:
            continue
        b, depth, start = load_int(segment, 4), load_int(segment, 5), load_int(segment, 7)
        b_bytes, left = depth * ROW_BYTES // 2, depth // 2 % TILE_ROWS
        shape_low_rank(min(bottom - top, TILE_ROWS), left)
        for panel in range(begin_panel, end_panel):
            halves, following = load_int(segment, 6) + 16 * panel, ahead_panel + panel - begin_panel
            begin_rank, second_rank, some_steps, some_left = 0, 0, 0, 0
            if load_int(segment, 3) and load_int(halves, 0) >= 0:
                begin_rank, second_rank = load_int(halves, 0), load_int(halves, 1)
                some_steps, some_left = depth // (2 * TILE_ROWS), left
                if following < panels:
                    fetch_ahead(b + following * b_bytes, b_bytes // 2, BF16)
                    fetch_ahead(load_int(segment, 6) + 16 * following, 8, BF16)
            target = sums + (panel - begin_panel) * BEGIN_ROOM
            for row in range(top, bottom, TILE_ROWS):
                expand_tile(
                    target + (row - first) * ROW_BYTES, low + row * low_stride * 2, low_stride * 2, begin_rank, second_rank,
                    b + panel * b_bytes, some_steps, some_left, start + 4 * panel * PANEL if start else 0,
                )  # fmt: skip


@cache
def tile_low_rank_kernel() -> Any:
    """`low_rank_kernel` in tiles, for A in groups. Arguments: the same. `low` has room for whole groups of ranks."""
    sums_bytes = MOST_TILES * GROUP_STEP

    @kernel
    def low_rank(data: Any) -> None:
        a = address_of(data)
        rows, inner, x, x_bytes = load_int(a, 2), load_int(a, 3), load_int(a, 5), 2 * load_int(a, 6)
        segments, low, low_stride = load_int(a, 11), load_int(a, 13), load_int(a, 14)
        end_segments = segments + SEGMENT_BYTES * load_int(a, 12)
        steps, left = inner // (2 * TILE_ROWS), inner // 2 % TILE_ROWS
        sums = reserve(sums_bytes)
        # Where the last tile of 16 rows may begin, so that none reads beyond x.
        latest = max(0, rows - TILE_ROWS)
        shape_low_rank(min(rows, TILE_ROWS), left)
        while True:
            segment, head, end, rank = low_rank_task(take_ticket(a), segments, end_segments, BLOCK_ROWS, GROUP)
            if segment >= end_segments:
                break
            second, third = min(head + TILE_ROWS, latest), min(head + 2 * TILE_ROWS, latest)
            multiply_ranks(
                sums, (end - head + TILE_ROWS - 1) // TILE_ROWS,
                x + min(head, latest) * x_bytes, x + second * x_bytes, x + third * x_bytes, x_bytes,
                load_int(segment, 2) + rank * inner * 2, steps, left,
            )  # fmt: skip
            for row in range(head, end):
                tile = (row - head) // TILE_ROWS
                source = (tile * TILE_ROWS + row - min(head + tile * TILE_ROWS, latest)) * LANES
                target = row * low_stride + rank
                for i in range(GROUP):
                    store(low, target + i, BF16, load(sums, source + i, F32))
        release_tiles()

    return low_rank
