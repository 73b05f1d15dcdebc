"""Paged attention in AMX tiles: up to 32 query rows at a time, over one span of a sequence's keys after another.

The cache is the one of the vector kernel in pairs: 16 pairs of a block's rows are a tile. A span begins at the same position whatever
the step computes. Its scores stand in float32 in the first cache; what was added up before it is scaled to the greatest score so far. So a
row's sums have one order whatever the other rows are.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from engine.cpu.kernels import amx
from engine.cpu.kernels.amx import LINE, TILE_ROWS, offset
from engine.cpu.kernels.amx_product import release_tiles
from engine.cpu.kernels.compiled import inlined, kernel
from engine.cpu.kernels.emit import (
    BF16,
    F32,
    I64,
    LANES,
    broadcast,
    load_vector,
    pointer_at,
    store_vector,
)
from engine.cpu.kernels.simd import address_of, as_float, exp, load, load_int, store, store_int, take_ticket
from engine.cpu.kernels.softmax import SPAN, raise_greatest, span_greatest, span_weights

ZERO, ONE, TWO, NEGATIVE = np.float32(0), np.float32(1), np.float32(2), np.float32(-1e30)
FIRST_KEYS = 0x0000FFFF0000FFFF
"""A mask for two pairs of 16-bit values. It keeps the lower half of each pair, which is the value of the pair's first key."""
TASK_ROWS = 2 * TILE_ROWS
APART = 4 * LANES
"""Rows of scores are multiples of this and 16 more apart, those of weights 32 more: an odd number of cache lines each, so that
the rows of a tile do not meet in the same places of the cache.
"""
_QUERY, _WEIGHTS, _KEYS, _VALUES = 4, 5, 6, 7
"""The tiles of factors; sums are tiles 0 to 3, two for each tile of rows."""


@inlined
def span_blocks(size: int) -> int:
    """The blocks of a span, which has at most SPAN keys if a block has not more."""
    return max(1, SPAN // size)


@inlined
def score_stride(lanes: int) -> int:
    """The float32 numbers between two rows of scores."""
    return (lanes + APART - 1) // APART * APART + LANES


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


@inlined
def _scale_and_cap(row: int, lanes: int, scale: Any, cap: Any) -> None:
    for i in range(lanes):
        score = load(row, i, F32) * scale
        if cap > 0:
            doubled = exp(min(score * (TWO / cap), np.float32(80)))
            score = cap * (ONE - TWO / (doubled + ONE))
        store(row, i, F32, score)


@inlined
def _copy_tail(tail: int, block: int, keys: int, pairs: int, width: int) -> None:
    """Copy the values of a block's first `keys` keys; zero for the others, of which the cache may have held anything."""
    words = width // 2
    for i in range(keys // 2 * words):
        store_int(tail, i, load_int(block, i))
    done = keys // 2 * words
    if keys % 2:
        for i in range(done, done + words):
            store_int(tail, i, load_int(block, i) & FIRST_KEYS)
        done += words
    for i in range(done, pairs * words):
        store_int(tail, i, 0)


@inlined
def _first_keys(
    task: int, tasks: int, sequences: int, tables: int, keys: int, block_bytes: int, head_bytes: int
) -> int:
    """Where the keys of a task's first block are."""
    sequence, kv_head = load_int(tasks, 3 * task), load_int(tasks, 3 * task + 1)
    block = load_int(tables, load_int(sequences, 4 * sequence + 3))
    place: int = keys + block * block_bytes + kv_head * head_bytes
    return place


@inlined
def _find_places(
    places: int, table: int, first: int, end: int, size: int, keys: int, key_block: int, values: int, value_block: int,
    value_bytes: int,
) -> int:  # fmt: skip
    """Where the keys and values of each 16 keys of some blocks are; how many there are."""
    number = 0
    for entry in range(first, end):
        block = load_int(table, entry)
        for within in range(size // LANES):
            store_int(places, 2 * number, keys + block * key_block + within * LINE)
            store_int(places, 2 * number + 1, values + block * value_block + within * value_bytes)
            number += 1
    return number


@cache
def tile_attend_kernel() -> Any:
    """`attend_kernel` in tiles. Arguments: the same. The key dim and the block size are multiples of 16."""

    @kernel
    def tile_attend(data: Any) -> None:
        a = address_of(data)
        tasks, num_tasks, sequences, tables = load_int(a, 2), load_int(a, 3), load_int(a, 4), load_int(a, 5)
        query, query_token, query_head = load_int(a, 8), load_int(a, 9), load_int(a, 10)
        keys, values, kv_heads, group = load_int(a, 11), load_int(a, 12), load_int(a, 13), load_int(a, 14)
        key_dim, value_dim, width, size = load_int(a, 15), load_int(a, 16), load_int(a, 17), load_int(a, 18)
        own_scale, window, cap, sinks = (
            as_float(load_int(a, 20)), load_int(a, 21), as_float(load_int(a, 22)), load_int(a, 23),
        )  # fmt: skip
        out, out_token, out_head = load_int(a, 24), load_int(a, 25), load_int(a, 26)
        span = span_blocks(size)
        stride = score_stride(span * size)
        weights_stride = stride + LANES
        rows_q = load_int(a, 6) + take_ticket(a + 8) * load_int(a, 7)  # this worker's scratch
        rows_out = rows_q + 2 * TASK_ROWS * key_dim
        tail = rows_out + 4 * TASK_ROWS * width
        greatest = tail + 2 * size * width
        found, factors, totals = greatest + 4 * TASK_ROWS, greatest + 8 * TASK_ROWS, greatest + 12 * TASK_ROWS
        bounds = greatest + 16 * TASK_ROWS
        places = bounds + 16 * TASK_ROWS
        rows_scores = places + 16 * (span * size // LANES + 2 * size // LANES + 2)
        rows_weights = rows_scores + 4 * TASK_ROWS * stride
        key_depth, value_depth = 16 if key_dim % 32 == 0 else 8, 16 if size % 32 == 0 else 8
        key_head, value_head = 2 * key_dim * size, 2 * size * width
        shaped = 0
        task = take_ticket(a)
        while task < num_tasks:
            following = take_ticket(a)
            sequence, kv_head, first_row = (
                load_int(tasks, 3 * task), load_int(tasks, 3 * task + 1), load_int(tasks, 3 * task + 2),
            )  # fmt: skip
            first_token, tokens, length, entry = (
                load_int(sequences, 4 * sequence), load_int(sequences, 4 * sequence + 1),
                load_int(sequences, 4 * sequence + 2), load_int(sequences, 4 * sequence + 3),
            )  # fmt: skip
            rows = min(TASK_ROWS, tokens * group - first_row)
            if min(rows, TILE_ROWS) != shaped:
                shape_attention(rows, key_depth, value_depth)
                shaped = min(rows, TILE_ROWS)
            for r in range(rows):
                token, head = (first_row + r) // group, kv_head * group + (first_row + r) % group
                source, target = query + 2 * ((first_token + token) * query_token + head * query_head), r * key_dim // 4
                for i in range(key_dim // 4):
                    store_int(rows_q, target + i, load_int(source, i))
                store(greatest, r, F32, load(sinks, head, F32) if sinks else NEGATIVE)
                store(totals, r, F32, ONE if sinks else ZERO)
                position = length - tokens + token
                store_int(bounds, 2 * r, max(position - window + 1, 0) if window else 0)
                store_int(bounds, 2 * r + 1, position + 1)
            for r in range(rows, TASK_ROWS):
                store(greatest, r, F32, ZERO)
                store(found, r, F32, ZERO)
            # Positions that any row of the task sees, by whole blocks.
            newest = length - tokens + (first_row + rows - 1) // group
            oldest = max(0, length - tokens + first_row // group - window + 1) if window else 0
            table = tables + 8 * entry
            own_keys, own_values = keys + kv_head * key_head, values + kv_head * value_head
            last_block = newest // size
            after, value_bytes = 0, 0
            if tokens * group <= TILE_ROWS:
                value_bytes = 2 * LANES * width
                if following < num_tasks:
                    after = _first_keys(following, tasks, sequences, tables, keys, kv_heads * key_head, key_head)
            first_block, fresh = oldest // size, 1
            while first_block <= last_block:
                span_first = first_block // span * span
                end_block = min(span_first + span, last_block + 1)
                blocks = end_block - first_block
                skipped = (first_block - span_first) * size
                scores, weights = rows_scores + 4 * skipped, rows_weights + 2 * skipped
                known = _find_places(
                    places, table, first_block, min(end_block + 2, last_block + 1), size, own_keys, kv_heads * key_head,
                    own_values, kv_heads * value_head, value_bytes,
                )  # fmt: skip
                store_int(places, 2 * known, after)
                store_int(places, 2 * known + 2, 0)
                tile_scores(
                    scores, stride, rows_q, rows, key_dim, key_depth, 4 * size, places, blocks * size // LANES, value_bytes,
                )  # fmt: skip
                last_values = 0
                if end_block > last_block and newest % size + 1 < size:
                    last_values = own_values + load_int(table, last_block) * kv_heads * value_head
                    _copy_tail(tail, last_values, newest % size + 1, size // 2, width)
                    last_values = tail
                scale = own_scale
                if cap > 0 or own_scale <= 0:
                    scale = ONE
                    for r in range(rows):
                        _scale_and_cap(rows_scores + 4 * (r * stride + skipped), blocks * size, own_scale, cap)
                base = span_first * size
                span_greatest(found, rows, rows_scores, stride, bounds, base, scale)
                changed = raise_greatest(greatest, found, factors, TASK_ROWS // LANES)
                span_weights(
                    rows_weights, weights_stride, totals, factors, greatest,
                    rows, rows_scores, stride, bounds, base, skipped, (end_block - span_first) * size, scale,
                )  # fmt: skip
                if changed and fresh == 0:
                    for r in range(rows):
                        scale_row(rows_out + 4 * r * width, width, load(factors, r, F32))
                tile_values(
                    rows_out, width, weights, weights_stride, rows, value_depth,
                    own_values, table, kv_heads * value_head, size, first_block, blocks, last_values, fresh,
                )  # fmt: skip
                first_block, fresh = end_block, 0
            for r in range(rows):
                token, head = (first_row + r) // group, kv_head * group + (first_row + r) % group
                target, inverse = (first_token + token) * out_token + head * out_head, ONE / load(totals, r, F32)
                whole = value_dim // LANES * LANES
                store_scaled(out + 2 * target, rows_out + 4 * r * width, whole, inverse)
                for d in range(whole, value_dim):
                    store(out, target + d, BF16, load(rows_out, r * width + d, F32) * inverse)
            task = following
        release_tiles()

    return tile_attend


def tile_scratch_bytes(key_dim: int, width: int, size: int) -> int:
    """Scratch bytes that one worker of `tile_attend` needs; whole cache lines."""
    lanes = max(1, SPAN // size) * size
    stride = -(-lanes // APART) * APART + LANES
    needed = TASK_ROWS * (2 * key_dim + 4 * width + 32 + 4 * stride + 2 * (stride + LANES)) + 2 * size * width
    needed += 16 * ((lanes + 2 * size) // LANES + 2)  # places
    return -(-needed // LINE) * LINE
