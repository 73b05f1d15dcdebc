"""The room of a product in AMX tiles: where the sums of a block leave the tiles, and what follows them there.

The endings of a block are made while the next block is multiplied, for tiles and vectors work at the same time. Nothing here multiplies in tiles.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from engine.cpu.kernels.amx import LINE, TILE_ROWS
from engine.cpu.kernels.emit import (
    F32,
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
)
from engine.cpu.kernels.tiles import ADD, GATE, PANEL, WIDEN, end_row

MOST_TILES = 3
"""Tiles of rows of a block: with two of columns their sums fill six of the eight registers."""
BLOCK_ROWS = MOST_TILES * TILE_ROWS
ROW_BYTES = PANEL * 4
"""Bytes of a row of sums, and of a panel's pairs (bfloat16) or fours (bytes) of inputs."""
STEP_BYTES = TILE_ROWS * ROW_BYTES
"""Bytes of a panel that one step multiplies: 32 inputs of bfloat16, 64 of bytes."""
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


def _field(builder: Any, room: Any, word: int) -> Any:
    return pointer_at(builder, room, I64(word), I64)


class Endings:
    """The endings that are not made yet of the block in the room."""

    def __init__(self, builder: Any, room: Any, kind: int, in_bytes: bool, ending: int) -> None:
        self._builder, self._room, self._kind, self._in_bytes, self._ending = builder, room, kind, in_bytes, ending
        first, self._end, self._out, self._stride = (
            builder.load(_field(builder, room, word)) for word in (NEXT, END, OUT, STRIDE)
        )
        self._next = cgutils.alloca_once_value(builder, first)

    def make_one(self) -> None:
        """Make the next ending if there is one."""
        builder = self._builder
        row = builder.load(self._next)
        with builder.if_then(builder.icmp_signed("<", row, self._end)):
            self._make(row)
            builder.store(builder.add(row, I64(1)), self._next)

    def make_rest(self) -> None:
        """Make all that are left."""
        builder = self._builder
        with cgutils.for_range_slice(builder, builder.load(self._next), self._end, I64(1)) as (row, _):
            self._make(row)
        builder.store(self._end, _field(builder, self._room, NEXT))

    def _make(self, row: Any) -> None:
        builder = self._builder
        sums = builder.add(self._room, I64(HEAD_BYTES))
        places = [builder.add(builder.mul(row, I64(PANEL)), I64(v * LANES)) for v in range(2)]
        if self._in_bytes:
            parts = _scaled(builder, self._room, sums, row, places)
        else:
            parts = [load_vector(builder, sums, place, F32) for place in places]
        end_row(builder, parts, self._out, builder.mul(self._stride, row), self._kind, self._ending)


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


class OutputRows:
    """Where the endings of a block will go. Its lines are prefetched, because they lie far apart and stores wait for each other."""

    def __init__(self, builder: Any, room: Any, out: Any, rows: Any, kind: int, ending: int) -> None:
        self._builder = builder
        size = 4 if ending in (ADD, WIDEN) or kind == F32 else 2
        self._lines = max(1, (LANES if ending == GATE else PANEL) * size // LINE)
        self._stride = builder.mul(builder.load(_field(builder, room, STRIDE)), I64(size))
        some = builder.icmp_signed("!=", out, I64(0))
        self._next = cgutils.alloca_once_value(builder, out)
        self._left = cgutils.alloca_once_value(builder, builder.select(some, rows, I64(0)))

    def fetch_one(self) -> None:
        """Prefetch the next row if there is one."""
        builder = self._builder
        left = builder.load(self._left)
        with builder.if_then(builder.icmp_signed(">", left, I64(0))):
            place = builder.load(self._next)
            for line in range(self._lines):
                prefetch_line(builder, place, I64(line))
            builder.store(builder.add(place, self._stride), self._next)
            builder.store(builder.sub(left, I64(1)), self._left)


@intrinsic(prefer_literal=True)
def end_block(typing_context: Any, room: Any, kind: Any, in_bytes: Any, ending: Any) -> Any:
    """Make the endings that are left of the block in the room."""
    number, of_bytes, then = kind.literal_value, bool(in_bytes.literal_value), ending.literal_value

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        Endings(builder, args[0], number, of_bytes, then).make_rest()
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
