"""x W^T in AMX tiles: a block of up to 48 rows times one panel of the weight, in bfloat16 or in bytes.

The weight's panels are those of the vector kernels: 16 rows of a panel are two tiles side by side. Sums leave the tiles through
a worker's `room`, so every ending of `end_row` serves here too. A block's ending is made while the next block is multiplied,
because tiles and vectors work at the same time. Nothing here takes work or knows where a panel's neighbours are.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from engine.cpu.kernels import amx
from engine.cpu.kernels.amx import LINE, TILE_ROWS, offset
from engine.cpu.kernels.coded import (
    GROUP_INPUTS,
    load_group,
    load_kept,
    load_kept_group,
    load_kept_number,
    load_table,
    prefetch_group,
    store_group,
)
from engine.cpu.kernels.emit import (
    F32,
    FIRST,
    FLOAT,
    I16,
    I32,
    I64,
    LANES,
    PAIRS,
    VECTOR,
    add_pairs,
    broadcast,
    load_vector,
    pointer_at,
    prefetch_line,
    store_vector,
    switch,
)
from engine.cpu.kernels.tiles import PANEL, end_row

MOST_TILES = 3
"""Tiles of rows of a block: with two of columns their sums fill six of the eight registers."""
BLOCK_ROWS = MOST_TILES * TILE_ROWS
ROW_BYTES = PANEL * 4
"""Bytes of a row of sums, and of a panel's pairs (bfloat16) or fours (bytes) of inputs."""
STEP_BYTES = TILE_ROWS * ROW_BYTES
"""Bytes of a panel that one step multiplies: 32 inputs of bfloat16, 64 of bytes."""
STEP_GROUPS = 2 * TILE_ROWS // GROUP_INPUTS
"""Groups of a coded panel that one step multiplies."""
AHEAD = 4
"""Steps between a prefetch of a block's own panel and its use; 2 measured alike."""

NEXT, END, OUT, STRIDE, SCALES, COLUMN_SCALES, START = range(7)
"""The head of a room, int64: of the block whose ending is not made yet, the next row and the number of rows; where its first row
goes, and the elements between rows; for bytes the scales of its rows and columns, and what is added (0: nothing).
"""
HEAD_BYTES = LINE
ROOM_BYTES = HEAD_BYTES + BLOCK_ROWS * ROW_BYTES
"""A room: its head, and sums [48, 32] of float32 or int32."""


@intrinsic
def make_room(typing_context: Any) -> Any:
    """The address of a room for this call of the kernel, with no block in it."""

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        area = cgutils.alloca_once(builder, ir.ArrayType(VECTOR, ROOM_BYTES // LINE))
        area.align = LINE
        room = builder.ptrtoint(area, I64)
        for word in (NEXT, END):
            builder.store(I64(0), pointer_at(builder, room, I64(word), I64))
        return room

    return types.int64(), emit


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
    fetch: Callable[[int], None],
) -> None:  # fmt: skip
    """One step: the sums of tile t of rows and half h of the panel are tile 2t + h.

    `near`: x stays in the first cache, for it meets panel after panel; else it passes, because the panel stays there. `fetch(n)` prefetches
    something after product n: a few lines with each, because many at once keep x waiting.
    """
    add, load_rows = amx.add_byte_products if in_bytes else amx.add_products, amx.load if near else amx.load_passing

    def columns(register: int, half: int) -> None:
        amx.load(builder, register, builder.add(panel, I64(LINE * half)), I64(ROW_BYTES))

    def multiply(number: int, rows: int, half: int) -> None:
        add(builder, 2 * (number // 2) + half, rows, 7 if tiles == MOST_TILES else 6 + half)
        fetch(number)

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


def _field(builder: Any, room: Any, word: int) -> Any:
    return pointer_at(builder, room, I64(word), I64)


def _make_endings(builder: Any, room: Any, most: Any, kind: int, in_bytes: bool, ending: int) -> None:
    """Of the block in the room the endings of up to `most` rows more."""
    sums = builder.add(room, I64(HEAD_BYTES))
    first, end = (builder.load(_field(builder, room, word)) for word in (NEXT, END))
    last = builder.add(first, most)
    last = builder.select(builder.icmp_signed("<", last, end), last, end)
    out, stride = (builder.load(_field(builder, room, word)) for word in (OUT, STRIDE))
    with cgutils.for_range_slice(builder, first, last, I64(1)) as (row, _):
        places = [builder.add(builder.mul(row, I64(PANEL)), I64(v * LANES)) for v in range(2)]
        if in_bytes:
            parts = _scaled(builder, room, sums, row, places)
        else:
            parts = [load_vector(builder, sums, place, F32) for place in places]
        end_row(builder, parts, out, builder.mul(stride, row), kind, ending)
    builder.store(last, _field(builder, room, NEXT))


def _scaled(builder: Any, room: Any, sums: Any, row: Any, places: list[Any]) -> list[Any]:
    """A row's sums of bytes as float32: times the scales of the row and the columns, plus what is added."""
    words = ir.VectorType(I32, LANES)
    scales, column_scales, start = (builder.load(_field(builder, room, w)) for w in (SCALES, COLUMN_SCALES, START))
    scale = broadcast(builder, builder.load(pointer_at(builder, scales, row, FLOAT)))
    parts = []
    for v, place in enumerate(places):
        total = builder.load(pointer_at(builder, sums, place, I32, words), align=4)
        both = builder.fmul(scale, load_vector(builder, column_scales, I64(v * LANES), F32))
        parts.append(builder.fmul(builder.sitofp(total, VECTOR), both))
    held = [cgutils.alloca_once_value(builder, part) for part in parts]
    with builder.if_then(builder.icmp_signed("!=", start, I64(0))):
        for v in range(2):
            moved = builder.fadd(builder.load(held[v]), load_vector(builder, start, I64(v * LANES), F32))
            builder.store(moved, held[v])
    return [builder.load(one) for one in held]


class _Decoder:
    """Emits the decoding of a panel's steps, one after the other."""

    def __init__(self, builder: Any, packed: Any, first_group: Any, out: Any, around: Any) -> None:
        self._builder, self._packed, self._first, self._out, self._around = builder, packed, first_group, out, around
        self._table, self._kept = load_table(builder, packed), load_kept(builder, packed)
        self._next = cgutils.alloca_once_value(builder, I64(0))
        """The kept group that comes next."""
        self._while_before(first_group, lambda number: None)

    def decode(self, step: Any) -> None:
        """Decode the next step, which is number `step`."""
        builder = self._builder
        begin = builder.add(self._first, builder.mul(step, I64(STEP_GROUPS)))
        slot = offset(builder, self._out, builder.and_(step, self._around), STEP_BYTES)
        for group in range(STEP_GROUPS):
            number = builder.add(begin, I64(group))
            prefetch_group(builder, self._packed, number, FIRST)
            store_group(builder, slot, I64(group), load_group(builder, self._packed, self._table, number))

        def put(index: Any) -> None:
            number, steps = load_kept_group(builder, self._kept, index)
            store_group(builder, slot, builder.sub(number, begin), steps)

        self._while_before(builder.add(begin, I64(STEP_GROUPS)), put)

    def _while_before(self, end: Any, use: Callable[[Any], None]) -> None:
        """Use the kept groups that come next and before group `end`."""
        builder = self._builder
        begin = builder.load(self._next)
        with cgutils.for_range(builder, builder.sub(self._kept.count, begin)) as loop:
            index = builder.add(begin, loop.index)
            number = load_kept_number(builder, self._kept, index)
            with builder.if_then(builder.icmp_signed(">=", number, end)):
                loop.do_break()
            use(index)
            builder.store(builder.add(index, I64(1)), self._next)


@intrinsic
def decode_groups(typing_context: Any, out: Any, packed: Any, first: Any, count: Any) -> Any:
    """Out = `count` groups of a coded panel, from number `first` on, as pairs."""

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        out, packed, first, count = args
        table, kept = load_table(builder, packed), load_kept(builder, packed)
        with cgutils.for_range(builder, count) as loop:
            number = builder.add(first, loop.index)
            store_group(builder, out, loop.index, load_group(builder, packed, table, number))
        with cgutils.for_range(builder, kept.count) as loop:
            number, steps = load_kept_group(builder, kept, loop.index)
            place = builder.sub(number, first)
            inside = builder.icmp_unsigned("<", place, count)
            with builder.if_then(inside):
                store_group(builder, out, place, steps)
        return context.get_dummy_value()

    return types.void(*(types.int64,) * 4), emit


@intrinsic(prefer_literal=True)
def multiply_block(
    typing_context: Any,
    room: Any, rows: Any, x: Any, x_bytes: Any, panel: Any, steps: Any, begin: Any, begin_bytes: Any, into: Any,
    near: Any, ahead: Any, lines: Any, packed: Any, first_group: Any, around: Any,
    kind: Any, in_bytes: Any, coded: Any, ending: Any,
) -> Any:  # fmt: skip
    """Sums [rows, 32] = begin + x [rows, steps * 32 or 64] times a panel, for the rows that `shape_tiles` has shaped the tiles for, at most 48.

    Meanwhile the endings of the block that is in the room are made. The sums begin at `begin` (0: at zero; rows `begin_bytes` apart), and go
    to the room, or to `into` if that is not 0. Rows of x are `x_bytes` apart. near: the panel itself is prefetched; else `lines` lines with
    each step from `ahead` on (0: none). The order of a sum is that of the steps, whatever the rows.

    coded, a compile-time constant too: a near panel is decoded on the way, from the coded panel at `packed` and its group number `first_group`
    on, to `panel`; step i of it lies at step number i & around, so that a ring does where it is used once.
    """
    number, of_bytes, then = kind.literal_value, bool(in_bytes.literal_value), ending.literal_value
    in_code = bool(coded.literal_value)

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        room, rows, x, x_bytes, panel, steps, begin, begin_bytes, into, near, ahead, lines, *coding = args
        packed, first_group, around = coding[:3]
        some = builder.select(builder.icmp_signed(">", steps, I64(0)), steps, I64(1))
        waiting = builder.sub(builder.load(_field(builder, room, END)), builder.load(_field(builder, room, NEXT)))
        each = builder.udiv(builder.add(waiting, builder.sub(some, I64(1))), some)
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

            def multiply_steps(is_near: bool) -> None:
                decoder = _Decoder(builder, packed, first_group, panel, around) if in_code and is_near else None
                if decoder is not None:
                    with builder.if_then(builder.icmp_signed(">", steps, I64(0))):
                        decoder.decode(I64(0))
                each_lines = builder.udiv(builder.add(lines, I64(2 * tiles - 1)), I64(2 * tiles))
                some = builder.select(builder.icmp_signed("!=", ahead, I64(0)), each_lines, I64(0))
                with cgutils.for_range(builder, steps) as loop:
                    here = offset(
                        builder, panel, builder.and_(loop.index, around) if in_code else loop.index, STEP_BYTES
                    )
                    if decoder is not None:
                        later = builder.add(loop.index, I64(1))
                        with builder.if_then(builder.icmp_signed("<", later, steps), likely=True):
                            decoder.decode(later)

                    def fetch(number: int, here: Any = here, step: Any = loop.index) -> None:
                        if not is_near:
                            ordinal = builder.mul(builder.add(builder.mul(step, I64(2 * tiles)), I64(number)), some)
                            with cgutils.for_range(builder, some) as line:
                                prefetch_line(builder, ahead, builder.add(ordinal, line.index))
                        elif decoder is None:
                            first, end = (STEP_BYTES // LINE * n // (2 * tiles) for n in (number, number + 1))
                            later = builder.add(here, I64(AHEAD * STEP_BYTES + LINE * first))
                            amx.fetch_lines(builder, later, end - first)

                    inputs = offset(builder, x, loop.index, LINE)
                    starts = [builder.add(inputs, builder.mul(x_bytes, first)) for first in first_rows]
                    _multiply(builder, tiles, here, starts, x_bytes, is_near, of_bytes, fetch)
                    _make_endings(builder, room, each, number, of_bytes, then)

            with builder.if_else(builder.icmp_signed("!=", begin, I64(0))) as (given, none):
                with given:
                    each_sum(begin, begin_bytes, amx.load)
                with none:
                    for tile in range(2 * tiles):
                        amx.clear(builder, tile)
            if tiles == 1:  # the only block of its panels
                multiply_steps(True)
            else:
                with builder.if_else(builder.icmp_signed("!=", near, I64(0))) as (once, again):
                    with once:
                        multiply_steps(True)
                    with again:
                        multiply_steps(False)
            _make_endings(builder, room, I64(BLOCK_ROWS), number, of_bytes, then)
            each_sum(target, I64(ROW_BYTES), amx.store)

        tiles = builder.udiv(builder.add(rows, I64(TILE_ROWS - 1)), I64(TILE_ROWS))
        switch(builder, tiles, MOST_TILES, block)
        return context.get_dummy_value()

    return types.void(*(types.int64,) * 15, kind, in_bytes, coded, ending), emit


@intrinsic(prefer_literal=True)
def end_block(typing_context: Any, room: Any, kind: Any, in_bytes: Any, ending: Any) -> Any:
    """Make the endings that are left of the block in the room."""
    number, of_bytes, then = kind.literal_value, bool(in_bytes.literal_value), ending.literal_value

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        _make_endings(builder, args[0], I64(BLOCK_ROWS), number, of_bytes, then)
        return context.get_dummy_value()

    return types.void(types.int64, kind, in_bytes, ending), emit


@intrinsic
def add_pairs_left(
    typing_context: Any, room: Any, rows: Any, x: Any, x_stride: Any, panel: Any, first: Any, pairs: Any
) -> Any:
    """Add the products of `pairs` pairs of bfloat16 inputs, which fill no step, from number `first` on to the sums in the room."""

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        room, rows, x, x_stride, panel, first, pairs = args
        sums = builder.add(room, I64(HEAD_BYTES))
        with cgutils.for_range(builder, rows) as loop:
            row = loop.index
            places = [builder.add(builder.mul(row, I64(PANEL)), I64(v * LANES)) for v in range(2)]
            totals = [cgutils.alloca_once_value(builder, load_vector(builder, sums, place, F32)) for place in places]
            with cgutils.for_range(builder, pairs) as rest:
                pair = builder.add(first, rest.index)
                index = builder.add(builder.mul(x_stride, row), builder.mul(pair, I64(2)))
                both = builder.load(pointer_at(builder, x, index, I16, FLOAT), align=2)
                factor = builder.bitcast(broadcast(builder, both), PAIRS)
                for v, total in enumerate(totals):
                    at = builder.add(builder.mul(pair, I64(PANEL)), I64(v * LANES))
                    add_pairs(builder, total, factor, builder.load(pointer_at(builder, panel, at, I32, PAIRS), align=4))
            for total, place in zip(totals, places, strict=True):
                store_vector(builder, builder.load(total), sums, place, F32)
        return context.get_dummy_value()

    return types.void(*(types.int64,) * 7), emit


@intrinsic
def scale_rows(typing_context: Any, room: Any, rows: Any, factors: Any, column: Any) -> Any:
    """Multiply the sums in the room by each row's factors: an int64 a row, 0 or the address of float32, of which those from
    `column` on belong to this panel.
    """

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        room, rows, factors, column = args
        sums = builder.add(room, I64(HEAD_BYTES))
        with cgutils.for_range(builder, rows) as loop:
            address = builder.load(pointer_at(builder, factors, loop.index, I64))
            with builder.if_then(builder.icmp_signed("!=", address, I64(0))):
                for v in range(2):
                    place = builder.add(builder.mul(loop.index, I64(PANEL)), I64(v * LANES))
                    factor = load_vector(builder, address, builder.add(column, I64(v * LANES)), F32)
                    part = builder.fmul(load_vector(builder, sums, place, F32), factor)
                    store_vector(builder, part, sums, place, F32)
        return context.get_dummy_value()

    return types.void(*(types.int64,) * 4), emit
