"""x W^T + b in AMX tiles: one pass over the weight for up to 32 rows, in bfloat16 or in bytes.

The weight's panels are those of the vector kernels: 16 rows of a panel are two tiles side by side. Sums leave the tiles
through memory that stays in the cache, so every ending of `end_row` serves here too.
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
from engine.cpu.kernels.emit import (
    BF16,
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
    store_vector,
)
from engine.cpu.kernels.tiles import PANEL, end_row

BLOCK_ROWS = 2 * TILE_ROWS
"""Rows that one pass over a panel serves: four tiles of sums, two of x, two of the weight."""
ROW_BYTES = PANEL * 4
"""Bytes of a row of sums, and of a panel's pairs (bfloat16) or fours (bytes) of inputs."""
STEP_BYTES = TILE_ROWS * ROW_BYTES
"""Bytes of a panel that one step multiplies: 32 inputs of bfloat16, 64 of bytes."""
AHEAD = 4
"""Steps between a prefetch and its use; 2 measured alike."""
_X, _WEIGHT = 4, 6
"""The first tile of x and of the weight; sums are tiles 0 to 3, two for each tile of x."""


@intrinsic
def shape_tiles(typing_context: Any, rows: Any) -> Any:
    """Shape the tiles for products of 1 to 32 rows."""

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        below = builder.icmp_signed("<", args[0], I64(TILE_ROWS))
        upper = builder.select(below, args[0], I64(TILE_ROWS))
        rest = builder.sub(args[0], upper)
        lower = builder.select(builder.icmp_signed(">", rest, I64(0)), rest, I64(1))
        heights = [upper, upper, lower, lower, upper, lower, I64(TILE_ROWS), I64(TILE_ROWS)]
        amx.shape(builder, [(height, I64(LINE)) for height in heights])
        return context.get_dummy_value()

    return types.void(types.int64), emit


@intrinsic
def release_tiles(typing_context: Any) -> Any:
    """Give the tiles back."""

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        amx.release(builder)
        return context.get_dummy_value()

    return types.void(), emit


def _sums_of(
    builder: Any, rows: Any, x: Any, x_bytes: Any, panel: Any, steps: Any, begin: Any, begin_bytes: Any,
    in_bytes: bool,
) -> Any:  # fmt: skip
    """The address of the sums [rows, 32] of a panel, which begin at `begin` (0: zero; rows `begin_bytes` apart)."""
    area = cgutils.alloca_once(builder, ir.ArrayType(VECTOR, 2 * BLOCK_ROWS))
    area.align = LINE
    room = builder.ptrtoint(area, I64)
    multiply = amx.add_byte_products if in_bytes else amx.add_products

    def step(number: Any, tiles: int) -> None:
        here = offset(builder, panel, number, STEP_BYTES)
        amx.fetch_lines(builder, builder.add(here, I64(AHEAD * STEP_BYTES)), STEP_BYTES // LINE)
        for half in range(2):
            amx.load(builder, _WEIGHT + half, builder.add(here, I64(LINE * half)), I64(ROW_BYTES))
        for tile in range(tiles):
            there = builder.add(offset(builder, x, number, LINE), builder.mul(x_bytes, I64(TILE_ROWS * tile)))
            amx.load(builder, _X + tile, there, x_bytes)
            for half in range(2):
                multiply(builder, 2 * tile + half, _X + tile, _WEIGHT + half)

    def block(tiles: int) -> None:
        with builder.if_else(builder.icmp_signed("!=", begin, I64(0))) as (given, none):
            with given:
                for tile in range(tiles):
                    there = builder.add(begin, builder.mul(begin_bytes, I64(TILE_ROWS * tile)))
                    for half in range(2):
                        amx.load(builder, 2 * tile + half, builder.add(there, I64(LINE * half)), begin_bytes)
            with none:
                for number in range(2 * tiles):
                    amx.clear(builder, number)
        with cgutils.for_range(builder, steps) as loop:
            step(loop.index, tiles)
        for tile in range(tiles):
            for half in range(2):
                there = builder.add(room, I64(tile * TILE_ROWS * ROW_BYTES + LINE * half))
                amx.store(builder, 2 * tile + half, there, I64(ROW_BYTES))

    with builder.if_else(builder.icmp_signed(">", rows, I64(TILE_ROWS))) as (two, one):
        with two:
            block(2)
        with one:
            block(1)
    return room


@intrinsic(prefer_literal=True)
def tile_product(
    typing_context: Any,
    rows: Any, out: Any, out_stride: Any, x: Any, x_stride: Any, panel: Any, inner: Any, start: Any, start_stride: Any,
    factors: Any, column: Any,
    kind: Any, paired: Any, ending: Any,
) -> Any:  # fmt: skip
    """What `product` does with panels in pairs, which are the only ones here, for 1 to 32 rows, for which `shape_tiles` has shaped the tiles.

    Inputs that fill no step of 32 are added last, by vectors.
    """
    number, then = kind.literal_value, ending.literal_value
    if number != BF16 or not paired.literal_value:
        return None

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        rows, out, out_stride, x, x_stride, panel, inner, start, start_stride, factors, column, *_ = args
        steps = builder.udiv(inner, I64(2 * TILE_ROWS))
        room = _sums_of(
            builder, rows, x, builder.mul(x_stride, I64(2)), panel, steps, start, builder.mul(start_stride, I64(4)),
            in_bytes=False,
        )  # fmt: skip
        first_pair = builder.mul(steps, I64(TILE_ROWS))
        left = builder.sub(builder.udiv(inner, I64(2)), first_pair)

        def each_row(change: Callable[[Any, list[Any]], list[Any] | None]) -> None:
            """Replace the two vectors of sums of each row by what `change` returns."""
            with cgutils.for_range(builder, rows) as loop:
                places = [builder.add(builder.mul(loop.index, I64(PANEL)), I64(v * LANES)) for v in range(2)]
                changed = change(loop.index, [load_vector(builder, room, place, F32) for place in places])
                for part, place in zip(changed or (), places, strict=False):
                    store_vector(builder, part, room, place, F32)

        def add_rest(r: Any, parts: list[Any]) -> list[Any]:
            sums = [cgutils.alloca_once_value(builder, part) for part in parts]
            with cgutils.for_range(builder, left) as rest:
                pair = builder.add(first_pair, rest.index)
                index = builder.add(builder.mul(x_stride, r), builder.mul(pair, I64(2)))
                both = builder.load(pointer_at(builder, x, index, I16, FLOAT), align=2)
                factor = builder.bitcast(broadcast(builder, both), PAIRS)
                for v, total in enumerate(sums):
                    at = builder.add(builder.mul(pair, I64(PANEL)), I64(v * LANES))
                    add_pairs(builder, total, factor, builder.load(pointer_at(builder, panel, at, I32, PAIRS), align=4))
            return [builder.load(total) for total in sums]

        def scale(r: Any, parts: list[Any]) -> list[Any]:
            address = builder.load(pointer_at(builder, factors, r, I64))
            held = [cgutils.alloca_once_value(builder, part) for part in parts]
            with builder.if_then(builder.icmp_signed("!=", address, I64(0))):
                for v, part in enumerate(parts):
                    factor = load_vector(builder, address, builder.add(column, I64(v * LANES)), F32)
                    builder.store(builder.fmul(part, factor), held[v])
            return [builder.load(one) for one in held]

        with builder.if_then(builder.icmp_signed("!=", left, I64(0)), likely=False):
            each_row(add_rest)
        with builder.if_then(builder.icmp_signed("!=", factors, I64(0)), likely=False):
            each_row(scale)
        each_row(lambda r, parts: end_row(builder, parts, out, builder.mul(out_stride, r), number, then))
        return context.get_dummy_value()

    return types.void(*(types.int64,) * 11, kind, paired, ending), emit


@intrinsic(prefer_literal=True)
def tile_byte_product(
    typing_context: Any,
    rows: Any, out: Any, out_stride: Any, x: Any, scales: Any, panel: Any, inner: Any, begin: Any, weight_scales: Any,
    start: Any, kind: Any, ending: Any,
) -> Any:  # fmt: skip
    """What `byte_product` does, for 1 to 32 rows, for which `shape_tiles` has shaped the tiles; `inner` is a multiple of
    64.
    """
    number, then = kind.literal_value, ending.literal_value

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        rows, out, out_stride, x, scales, panel, inner, begin, weight_scales, start, *_ = args
        steps = builder.udiv(inner, I64(LINE))
        room = _sums_of(builder, rows, x, inner, panel, steps, begin, I64(0), in_bytes=True)
        words = ir.VectorType(I32, LANES)
        with cgutils.for_range(builder, rows) as loop:
            scale = broadcast(builder, builder.load(pointer_at(builder, scales, loop.index, FLOAT)))
            parts = []
            for v in range(2):
                index = builder.add(builder.mul(loop.index, I64(PANEL)), I64(v * LANES))
                total = builder.load(pointer_at(builder, room, index, I32, words), align=4)
                both = builder.fmul(scale, load_vector(builder, weight_scales, I64(v * LANES), F32))
                parts.append(builder.fmul(builder.sitofp(total, VECTOR), both))
            held = [cgutils.alloca_once_value(builder, part) for part in parts]
            with builder.if_then(builder.icmp_signed("!=", start, I64(0))):
                for v in range(2):
                    moved = builder.fadd(builder.load(held[v]), load_vector(builder, start, I64(v * LANES), F32))
                    builder.store(moved, held[v])
            row = builder.mul(out_stride, loop.index)
            end_row(builder, [builder.load(one) for one in held], out, row, number, then)
        return context.get_dummy_value()

    return types.void(*(types.int64,) * 10, kind, ending), emit
