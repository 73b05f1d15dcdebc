"""x W^T in AMX tiles: a block of up to 48 rows times one panel of the weight, in bfloat16 or in bytes.

The weight's panels are those of the vector kernels: 16 rows of a panel are two tiles side by side. Sums leave the tiles through
a worker's room (`engine.cpu.kernels.amx_room`), so every ending of `end_row` serves here too. Nothing here takes work or knows where a
panel's neighbours are.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from engine.cpu.kernels import amx
from engine.cpu.kernels.amx import LINE, TILE_ROWS, offset
from engine.cpu.kernels.amx_decode import Decoder
from engine.cpu.kernels.amx_room import HEAD_BYTES, MOST_TILES, ROW_BYTES, STEP_BYTES, Endings, OutputRows
from engine.cpu.kernels.emit import FIRST, I64, SECOND, prefetch_line, switch

AHEAD, FAR_AHEAD = 4, 16
"""Steps between a prefetch of the only block's panel and its use: into the first cache, and into the second for the largest block, whose rows
need the first one.
"""

ONLY_BLOCK, LATER_BLOCK, FIRST_BLOCK = range(3)
"""A block's turn at its panel. Plain panels take the first block as any later one."""


@intrinsic
def shape_tiles(typing_context: Any, rows: Any) -> Any:
    """Shape the tiles for blocks of so many rows, 1 to 16, or for all blocks of 16 rows and more."""

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        below = builder.icmp_signed("<", args[0], I64(TILE_ROWS))
        height = builder.select(below, args[0], I64(TILE_ROWS))
        amx.shape(builder, [(height, I64(LINE))] * 6 + [(I64(TILE_ROWS), I64(LINE))] * 2)
        return context.get_dummy_value()

    return types.void(types.int64), emit


@intrinsic
def release_tiles(typing_context: Any) -> Any:
    """Give the tiles back."""

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        amx.release(builder)
        return context.get_dummy_value()

    return types.void(), emit


def _multiply(
    builder: Any, tiles: int, panel: Any, x: list[Any], x_bytes: Any, near: bool, in_bytes: bool,
    after: Callable[[int], None],
) -> None:  # fmt: skip
    """One step: the sums of tile t of rows and half h of the panel are tile 2t + h.

    `near`: x stays in the first cache, for it meets panel after panel; else it passes, because the panel stays there. `after(n)` emits what
    follows product n: a little each, because the tiles rest while many other instructions wait for them.
    """
    add, load_rows = amx.add_byte_products if in_bytes else amx.add_products, amx.load if near else amx.load_passing

    def columns(register: int, half: int) -> None:
        amx.load(builder, register, builder.add(panel, I64(LINE * half)), I64(ROW_BYTES))

    def multiply(number: int, rows: int, half: int) -> None:
        add(builder, 2 * (number // 2) + half, rows, 7 if tiles == MOST_TILES else 6 + half)
        after(number)

    if tiles < MOST_TILES:
        for half in range(2):
            columns(6 + half, half)
        for tile in range(tiles):
            load_rows(builder, 4 + tile, x[tile], x_bytes)
        for number in range(2 * tiles):
            multiply(number, 4 + number // 2, number % 2)
        return
    half = 0
    columns(7, half)
    for tile in range(tiles):
        load_rows(builder, 6, x[tile], x_bytes)
        multiply(2 * tile, 6, half)
        half = 1 - half
        columns(7, half)
        multiply(2 * tile + 1, 6, half)


@intrinsic(prefer_literal=True)
def multiply_block(
    typing_context: Any,
    room: Any, rows: Any, x: Any, x_bytes: Any, panel: Any, steps: Any, begin: Any, begin_bytes: Any, into: Any, out: Any,
    turn: Any, ahead: Any, lines: Any, packed: Any, first_group: Any, around: Any,
    kind: Any, in_bytes: Any, coded: Any, ending: Any,
) -> Any:  # fmt: skip
    """Sums [rows, 32] = begin + x [rows, steps * 32 or 64] times a panel, for the rows that `shape_tiles` has shaped the tiles for, at most 48.

    Meanwhile the endings of the block that is in the room are made. The sums begin at `begin` (0: at zero; rows `begin_bytes` apart), and go
    to the room, or to `into` if that is not 0. Rows of x are `x_bytes` apart. turn: ONLY_BLOCK, FIRST_BLOCK or LATER_BLOCK. The only block prefetches its own panel;
    the others prefetch `lines` lines from `ahead` on, a few with each product, and the lines of `out`, where their endings will go (0: no
    endings). The order of a sum is that of the steps, whatever the rows.

    coded, a compile-time constant too: the only or first block decodes its panel on the way, from the coded panel at `packed` and its group number
    `first_group` on, to `panel`; step i of it lies at step number i & around, so that a ring does where it is used once.
    """
    number, of_bytes, then = kind.literal_value, bool(in_bytes.literal_value), ending.literal_value
    in_code = bool(coded.literal_value)

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        room, rows, x, x_bytes, panel, steps, begin, begin_bytes, into, out, turn, ahead, lines, *coding = args
        packed, first_group, around = coding[:3]
        endings = Endings(builder, room, number, of_bytes, then)
        outputs = OutputRows(builder, room, out, rows, number, then)
        below = builder.icmp_signed(">", rows, I64(TILE_ROWS))
        # The last tile ends with the last row: the rows that it shares with the one before are the same twice.
        final = builder.select(below, builder.sub(rows, I64(TILE_ROWS)), I64(0))
        inside = builder.add(room, I64(HEAD_BYTES))
        target = builder.select(builder.icmp_signed("!=", into, I64(0)), into, inside)

        def block(tiles: int) -> None:
            first_rows = [I64(TILE_ROWS * tile) for tile in range(tiles - 1)] + [final]

            def each_sum(address: Any, row_bytes: Any, move: Any) -> None:
                for tile, first in enumerate(first_rows):
                    there = builder.add(address, builder.mul(row_bytes, first))
                    for half in range(2):
                        move(builder, 2 * tile + half, builder.add(there, I64(LINE * half)), row_bytes)

            def multiply_steps(turn: int) -> None:
                decoder = None
                if in_code and turn != LATER_BLOCK:
                    decoder = Decoder(builder, packed, first_group, panel, around, turn == ONLY_BLOCK)
                if decoder is not None:
                    with builder.if_then(builder.icmp_signed(">", steps, I64(0))):
                        decoder.decode(I64(0))
                some_steps = builder.select(builder.icmp_signed(">", steps, I64(0)), steps, I64(1))
                products = builder.mul(some_steps, I64(2 * tiles))
                each = builder.udiv(builder.add(lines, builder.sub(products, I64(1))), products)
                place = cgutils.alloca_once_value(builder, ahead)
                fetch_end = offset(builder, ahead, lines, LINE)
                with cgutils.for_range(builder, steps) as loop:
                    number = builder.and_(loop.index, around) if in_code else loop.index
                    here = offset(builder, panel, number, STEP_BYTES)
                    if decoder is not None:
                        later = builder.add(loop.index, I64(1))
                        with builder.if_then(builder.icmp_signed("<", later, steps), likely=True):
                            decoder.decode(later)

                    def fetch() -> None:
                        there = builder.load(place)
                        with builder.if_then(builder.icmp_unsigned("<", there, fetch_end)):
                            prefetch_line(builder, there, I64(0))
                            builder.store(builder.add(there, I64(LINE)), place)

                    def after(number: int, here: Any = here) -> None:
                        endings.make_one()
                        if turn != ONLY_BLOCK:
                            outputs.fetch_one()
                            with cgutils.for_range(builder, each):
                                fetch()
                        elif decoder is None:
                            first, end = (STEP_BYTES // LINE * n // (2 * tiles) for n in (number, number + 1))
                            distance, cache = (FAR_AHEAD, SECOND) if tiles == MOST_TILES else (AHEAD, FIRST)
                            later = builder.add(here, I64(distance * STEP_BYTES + LINE * first))
                            amx.fetch_lines(builder, later, end - first, cache)

                    inputs = offset(builder, x, loop.index, LINE)
                    starts = [builder.add(inputs, builder.mul(x_bytes, first)) for first in first_rows]
                    _multiply(builder, tiles, here, starts, x_bytes, turn == ONLY_BLOCK, of_bytes, after)

            with builder.if_else(builder.icmp_signed("!=", begin, I64(0))) as (given, none):
                with given:
                    each_sum(begin, begin_bytes, amx.load)
                with none:
                    for tile in range(2 * tiles):
                        amx.clear(builder, tile)
            turns = [ONLY_BLOCK] if tiles == 1 else [ONLY_BLOCK, LATER_BLOCK, FIRST_BLOCK][: 3 if in_code else 2]
            switch(builder, builder.add(turn, I64(1)), len(turns), lambda number: multiply_steps(turns[number - 1]))
            endings.make_rest()
            each_sum(target, I64(ROW_BYTES), amx.store)

        tiles = builder.udiv(builder.add(rows, I64(TILE_ROWS - 1)), I64(TILE_ROWS))
        switch(builder, tiles, MOST_TILES, block)
        return context.get_dummy_value()

    return types.void(*(types.int64,) * 16, kind, in_bytes, coded, ending), emit
