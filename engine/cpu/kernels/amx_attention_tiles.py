"""The products of attention in AMX tiles, as Numba intrinsics: queries times keys, and weights times values, for up to 32 rows.

The cache is the one of the vector kernel in pairs: 16 pairs of a block's rows are a tile.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from engine.cpu.kernels import amx
from engine.cpu.kernels.amx import LINE, TILE_ROWS, offset
from engine.cpu.kernels.emit import BF16, F32, I64, LANES, broadcast, load_vector, pointer_at, store_vector

TASK_ROWS = 2 * TILE_ROWS
_QUERY, _WEIGHTS, _KEYS, _VALUES = 4, 5, 6, 7
"""The tiles of factors; sums are tiles 0 to 3, two for each tile of rows."""


@intrinsic
def shape_attention(typing_context: Any, rows: Any, key_depth: Any, value_depth: Any) -> Any:
    """Shape the tiles for 1 to 32 query rows; a depth is the pairs that one product adds up, 8 or 16."""

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        rows, key_depth, value_depth = args
        below = builder.icmp_signed("<", rows, I64(TILE_ROWS))
        height = builder.select(below, rows, I64(TILE_ROWS))
        line, key_line, value_line = I64(LINE), builder.mul(key_depth, I64(4)), builder.mul(value_depth, I64(4))
        factors = [(height, key_line), (height, value_line), (key_depth, line), (value_depth, line)]
        amx.shape(builder, [(height, line)] * 4 + factors)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64), emit


def _in_tiles(builder: Any, rows: Any, body: Callable[[list[Any]], None]) -> None:
    """`body` with the first row of each tile of 1 to 32 rows. The last tile ends with the last row: what it shares with the one
    before is the same twice.
    """
    with builder.if_else(builder.icmp_signed(">", rows, I64(TILE_ROWS))) as (two, one):
        with two:
            body([I64(0), builder.sub(rows, I64(TILE_ROWS))])
        with one:
            body([I64(0)])


def _add_products(
    builder: Any, left: int, lefts: list[Any], left_line: Any, right: int, rights: list[Any], right_line: Any
) -> None:
    """Tile 2t + h += tile t of `lefts` times tile h of `rights`, which pass the first cache: it is for what comes again."""
    tile = 0
    amx.load(builder, left, lefts[tile], left_line)
    for half, place in enumerate(rights):
        amx.load_passing(builder, right, place, right_line)
        amx.add_products(builder, 2 * tile + half, left, right)
        if len(lefts) == 2:
            tile = 1 - tile
            amx.load(builder, left, lefts[tile], left_line)
            amx.add_products(builder, 2 * tile + half, left, right)


def _block(builder: Any, table: Any, number: Any) -> Any:
    return builder.load(pointer_at(builder, table, number, I64))


@intrinsic
def tile_scores(
    typing_context: Any,
    out: Any, out_stride: Any, query: Any, rows: Any, dim: Any, depth: Any,
    key_line: Any, places: Any, groups: Any, value_bytes: Any,
) -> Any:  # fmt: skip
    """out[r, g * 16 + lane] = query[r] . key, for `groups` groups of 16 keys; an odd last group is computed twice.

    query: [rows, dim] bfloat16, up to 32 rows. places: int64 [groups + 2, 2], where each group's keys and values are. Keys are [dim / 2,
    16, 2], rows `key_line` bytes apart. out: float32, rows `out_stride` apart, room for an even number of groups. value_bytes: what the
    values of 16 keys take; they and the keys two groups further on (0: none) are prefetched, since blocks lie anywhere. 0: they are in
    the cache already.
    """

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        out, out_stride, query, rows, dim, depth, key_line, places, groups, value_bytes = args
        query_line = builder.mul(dim, I64(2))
        key_lines = builder.udiv(dim, I64(2))
        steps = builder.udiv(key_lines, depth)
        pairs = builder.udiv(builder.add(groups, I64(1)), I64(2))

        def place(group: Any, which: int) -> Any:
            index = builder.add(builder.mul(group, I64(2)), I64(which))
            return builder.load(pointer_at(builder, places, index, I64))

        def fetch(group: Any, both: list[Any]) -> None:
            for number, one in enumerate(both):
                keys = place(builder.add(group, I64(2 + number)), 0)
                some = builder.select(builder.icmp_signed("!=", keys, I64(0)), key_lines, I64(0))
                with cgutils.for_range(builder, some) as line:
                    amx.fetch_lines(builder, builder.add(keys, builder.mul(line.index, key_line)), 1)
                with cgutils.for_range(builder, builder.udiv(value_bytes, I64(LINE))) as line:
                    amx.fetch_lines(builder, offset(builder, place(one, 1), line.index, LINE), 1)

        def all_groups(firsts: list[Any]) -> None:
            final = builder.sub(groups, I64(1))
            with cgutils.for_range(builder, pairs) as pair:
                group = builder.mul(pair.index, I64(2))
                second = builder.add(group, I64(1))
                both = [group, builder.select(builder.icmp_signed("<", second, final), second, final)]
                with builder.if_then(builder.icmp_signed("!=", value_bytes, I64(0))):
                    fetch(group, both)
                starts = [place(one, 0) for one in both]
                for number in range(2 * len(firsts)):
                    amx.clear(builder, number)
                with cgutils.for_range(builder, steps) as step:
                    pairs_done = builder.mul(step.index, depth)
                    parts = offset(builder, query, pairs_done, 4)
                    _add_products(
                        builder,
                        _QUERY, [builder.add(parts, builder.mul(query_line, row)) for row in firsts], query_line,
                        _KEYS, [builder.add(start, builder.mul(pairs_done, key_line)) for start in starts], key_line,
                    )  # fmt: skip
                line = builder.mul(out_stride, I64(4))
                there = offset(builder, out, pair.index, 8 * LANES)
                for tile, row in enumerate(firsts):
                    for half in range(2):
                        target = builder.add(there, builder.add(builder.mul(line, row), I64(LINE * half)))
                        amx.store(builder, 2 * tile + half, target, line)

        _in_tiles(builder, rows, all_groups)
        return context.get_dummy_value()

    return types.void(*(types.int64,) * 10), emit


@intrinsic
def tile_values(
    typing_context: Any,
    out: Any, width: Any, weights: Any, weights_stride: Any, rows: Any, depth: Any,
    values: Any, table: Any, block_bytes: Any, block_size: Any, first: Any, blocks: Any, tail: Any, fresh: Any,
) -> Any:  # fmt: skip
    """out[r, :width] += sum over keys of weights[r, key] * value[key], up to 32 rows; `width` is a multiple of 16. fresh: it was zero.

    values: blocks of [block size / 2, width, 2], found through the int64 `table` from its entry `first` on; the last block is
    read at `tail` instead if that is not 0. weights: bfloat16. out: float32 [rows, width].
    """

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        (out, width, weights, weights_stride, rows, depth, values, table, block_bytes, block_size, first, blocks, tail,
         fresh) = args  # fmt: skip
        line, weights_line = builder.mul(width, I64(4)), builder.mul(weights_stride, I64(2))
        steps = builder.udiv(builder.udiv(block_size, I64(2)), depth)
        columns = builder.udiv(width, I64(LANES))
        has_tail = builder.icmp_signed("!=", tail, I64(0))
        final = builder.select(has_tail, builder.sub(blocks, I64(1)), I64(-1))

        def some(column: Any, count: int, firsts: list[Any]) -> None:
            """The sums of `count` times 16 columns."""

            def each_sum(move: Callable[..., None]) -> None:
                for tile, row in enumerate(firsts):
                    for half in range(count):
                        there = offset(builder, out, builder.add(column, I64(half)), LINE)
                        move(builder, 2 * tile + half, builder.add(there, builder.mul(line, row)), line)

            with builder.if_else(builder.icmp_signed("!=", fresh, I64(0))) as (zero, given):
                with zero:
                    for number in range(2 * len(firsts)):
                        amx.clear(builder, number)
                with given:
                    each_sum(amx.load)
            with cgutils.for_range(builder, blocks) as b:
                block = _block(builder, table, builder.add(first, b.index))
                there = builder.add(values, builder.mul(block, block_bytes))
                there = builder.select(builder.icmp_signed("==", b.index, final), tail, there)
                lanes = builder.mul(b.index, block_size)
                with cgutils.for_range(builder, steps) as step:
                    pairs_done = builder.mul(step.index, depth)
                    row_of = builder.add(there, builder.mul(pairs_done, line))
                    lane = offset(builder, weights, builder.add(lanes, builder.mul(pairs_done, I64(2))), 2)
                    _add_products(
                        builder,
                        _WEIGHTS, [builder.add(lane, builder.mul(weights_line, row)) for row in firsts], weights_line,
                        _VALUES, [offset(builder, row_of, builder.add(column, I64(h)), LINE) for h in range(count)], line,
                    )  # fmt: skip
            each_sum(amx.store)

        def all_columns(firsts: list[Any]) -> None:
            with cgutils.for_range(builder, builder.udiv(columns, I64(2))) as two:
                some(builder.mul(two.index, I64(2)), 2, firsts)
            with builder.if_then(builder.icmp_signed("!=", builder.urem(columns, I64(2)), I64(0))):
                some(builder.sub(columns, I64(1)), 1, firsts)

        _in_tiles(builder, rows, all_columns)
        return context.get_dummy_value()

    return types.void(*(types.int64,) * 14), emit


@intrinsic
def scale_row(typing_context: Any, row: Any, count: Any, factor: Any) -> Any:
    """row[:count] *= factor in float32, 16 at a time; `count` is a multiple of 16."""

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        row, count, factor = args
        by = broadcast(builder, factor)
        with cgutils.for_range(builder, builder.udiv(count, I64(LANES))) as vector:
            index = builder.mul(vector.index, I64(LANES))
            store_vector(builder, builder.fmul(load_vector(builder, row, index, F32), by), row, index, F32)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.float32), emit


@intrinsic
def store_scaled(typing_context: Any, out: Any, rows: Any, count: Any, factor: Any) -> Any:
    """out[:count] = rows[:count] * factor in bfloat16, 16 at a time; `count` is a multiple of 16."""

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        out, rows, count, factor = args
        by = broadcast(builder, factor)
        with cgutils.for_range(builder, builder.udiv(count, I64(LANES))) as vector:
            index = builder.mul(vector.index, I64(LANES))
            store_vector(builder, builder.fmul(load_vector(builder, rows, index, F32), by), out, index, BF16)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64, types.float32), emit
