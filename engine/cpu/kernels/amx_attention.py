"""Paged attention in AMX tiles: 16 query rows at a time against the keys of a sequence, then their weights against the values.

The cache is the one of the vector kernel in pairs: 16 pairs of a block's rows are a tile. All scores of a row stand in
float32 between the two products, so its softmax is exact, and its sums have one order whatever the other rows are.
"""

from __future__ import annotations

import math
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
from engine.cpu.kernels.softmax import softmax_row

ONE, TWO, NEGATIVE = np.float32(1), np.float32(2), np.float32(-1e30)
FIRST_KEYS = 0x0000FFFF0000FFFF
"""A mask for two pairs of 16-bit values. It keeps the lower half of each pair, which is the value of the pair's first key."""
APART = 4 * LANES
"""Rows of scores are multiples of this and 16 more apart, those of weights 32 more: an odd number of cache lines each, so that
the rows of a tile do not meet in the same places of the cache.
"""
_SUMS, _WEIGHTS, _QUERY, _KEYS = 0, 2, 4, 6
_VALUES = (3, 5)
"""Tiles: two of sums, two of keys, two of values; one of the query, one of the weights."""


@intrinsic
def shape_attention(typing_context: Any, rows: Any, key_depth: Any, value_depth: Any) -> Any:
    """Shape the tiles for 1 to 16 query rows; a depth is the pairs that one product adds up, 8 or 16."""

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        rows, key_depth, value_depth = args
        line, key_line, value_line = I64(LINE), builder.mul(key_depth, I64(4)), builder.mul(value_depth, I64(4))
        amx.shape(
            builder,
            [
                (rows, line), (rows, line), (rows, value_line), (value_depth, line),
                (rows, key_line), (value_depth, line), (key_depth, line), (key_depth, line),
            ],
        )  # fmt: skip
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64), emit


def _block(builder: Any, table: Any, number: Any) -> Any:
    return builder.load(pointer_at(builder, table, number, I64))


@intrinsic
def tile_scores(
    typing_context: Any,
    out: Any, out_stride: Any, query: Any, dim: Any, depth: Any,
    keys: Any, table: Any, block_bytes: Any, block_size: Any, first: Any, groups: Any,
    values: Any, value_block_bytes: Any, value_bytes: Any,
) -> Any:  # fmt: skip
    """out[r, g * 16 + lane] = query[r] . key, for groups of 16 keys; an odd last group is computed twice.

    query: [rows, dim] bfloat16. keys: blocks of [dim / 2, block size, 2], found through the int64 `table` from its entry
    `first` on. out: float32, rows `out_stride` apart, room for an even number of groups. value_bytes: what the values of 16 keys
    take; they and the next group's keys are prefetched, since blocks lie anywhere. 0: they are in the cache already.
    """

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        (out, out_stride, query, dim, depth, keys, table, block_bytes, block_size, first, groups,
         values, value_block_bytes, value_bytes) = args  # fmt: skip
        per_block = builder.udiv(block_size, I64(LANES))
        key_line = builder.mul(block_size, I64(4))
        query_line = builder.mul(dim, I64(2))
        steps = builder.udiv(builder.udiv(dim, I64(2)), depth)
        pairs = builder.udiv(builder.add(groups, I64(1)), I64(2))
        last = builder.sub(groups, I64(1))

        def places(group: Any) -> tuple[Any, Any]:
            """Where the group's keys are, and their values."""
            block = _block(builder, table, builder.add(first, builder.udiv(group, per_block)))
            within = builder.urem(group, per_block)
            key = builder.add(offset(builder, keys, within, LINE), builder.mul(block, block_bytes))
            value = builder.add(values, builder.mul(block, value_block_bytes))
            return key, builder.add(value, builder.mul(within, value_bytes))

        def at_most_last(group: Any) -> Any:
            return builder.select(builder.icmp_signed("<", group, last), group, last)

        with cgutils.for_range(builder, pairs) as pair:
            group = builder.mul(pair.index, I64(2))
            both = [group, at_most_last(builder.add(group, I64(1)))]
            with builder.if_then(builder.icmp_signed("!=", value_bytes, I64(0))):
                for number, one in enumerate(both):
                    next_key, _ = places(at_most_last(builder.add(group, I64(2 + number))))
                    _, value = places(one)
                    with cgutils.for_range(builder, builder.udiv(dim, I64(2))) as line:
                        amx.fetch_lines(builder, builder.add(next_key, builder.mul(line.index, key_line)), 1)
                    with cgutils.for_range(builder, builder.udiv(value_bytes, I64(LINE))) as line:
                        amx.fetch_lines(builder, offset(builder, value, line.index, LINE), 1)
            starts = [places(one)[0] for one in both]
            for half in range(2):
                amx.clear(builder, _SUMS + half)
            with cgutils.for_range(builder, steps) as step:
                pairs_done = builder.mul(step.index, depth)
                amx.load(builder, _QUERY, offset(builder, query, pairs_done, 4), query_line)
                for half, start in enumerate(starts):
                    amx.load(builder, _KEYS + half, builder.add(start, builder.mul(pairs_done, key_line)), key_line)
                    amx.add_products(builder, _SUMS + half, _QUERY, _KEYS + half)
            for half in range(2):
                there = builder.add(offset(builder, out, group, 4 * LANES), I64(LINE * half))
                amx.store(builder, _SUMS + half, there, builder.mul(out_stride, I64(4)))
        return context.get_dummy_value()

    return types.void(*(types.int64,) * 14), emit


@intrinsic
def tile_values(
    typing_context: Any,
    out: Any, width: Any, weights: Any, weights_stride: Any, depth: Any,
    values: Any, table: Any, block_bytes: Any, block_size: Any, first: Any, blocks: Any, tail: Any,
) -> Any:  # fmt: skip
    """out[r, :width] = sum over keys of weights[r, key] * value[key]; `width` is a multiple of 16.

    values: blocks of [block size / 2, width, 2], found through the int64 `table` from its entry `first` on; the last block is
    read at `tail` instead. weights: bfloat16. out: float32 [rows, width].
    """

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        out, width, weights, weights_stride, depth, values, table, block_bytes, block_size, first, blocks, tail = args
        line, weights_line = builder.mul(width, I64(4)), builder.mul(weights_stride, I64(2))
        steps = builder.udiv(builder.udiv(block_size, I64(2)), depth)
        columns = builder.udiv(width, I64(LANES))
        final = builder.sub(blocks, I64(1))

        def some(column: Any, count: int) -> None:
            """The sums of `count` times 16 columns."""
            for half in range(count):
                amx.clear(builder, _SUMS + half)
            with cgutils.for_range(builder, blocks) as b:
                block = _block(builder, table, builder.add(first, b.index))
                there = builder.add(values, builder.mul(block, block_bytes))
                there = builder.select(builder.icmp_signed("==", b.index, final), tail, there)
                lanes = builder.mul(b.index, block_size)
                with cgutils.for_range(builder, steps) as step:
                    pairs_done = builder.mul(step.index, depth)
                    row = builder.add(there, builder.mul(pairs_done, line))
                    lane = builder.add(lanes, builder.mul(pairs_done, I64(2)))
                    amx.load(builder, _WEIGHTS, offset(builder, weights, lane, 2), weights_line)
                    for half in range(count):
                        place = offset(builder, row, builder.add(column, I64(half)), LINE)
                        amx.load(builder, _VALUES[half], place, line)
                        amx.add_products(builder, _SUMS + half, _WEIGHTS, _VALUES[half])
            for half in range(count):
                amx.store(builder, _SUMS + half, offset(builder, out, builder.add(column, I64(half)), LINE), line)

        with cgutils.for_range(builder, builder.udiv(columns, I64(2))) as two:
            some(builder.mul(two.index, I64(2)), 2)
        with builder.if_then(builder.icmp_signed("!=", builder.urem(columns, I64(2)), I64(0))):
            some(builder.sub(columns, I64(1)), 1)
        return context.get_dummy_value()

    return types.void(*(types.int64,) * 12), emit


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
        rows_q = load_int(a, 6) + take_ticket(a + 8) * load_int(a, 7)  # this worker's scratch
        rows_out = rows_q + 2 * TILE_ROWS * key_dim
        tail = rows_out + 4 * TILE_ROWS * width
        rows_scores = tail + 2 * size * width
        key_depth, value_depth = 16 if key_dim % 32 == 0 else 8, 16 if size % 32 == 0 else 8
        key_head, value_head = 2 * key_dim * size, 2 * size * width
        shaped = 0
        while True:
            task = take_ticket(a)
            if task >= num_tasks:
                break
            sequence, kv_head, first_row = (
                load_int(tasks, 3 * task), load_int(tasks, 3 * task + 1), load_int(tasks, 3 * task + 2),
            )  # fmt: skip
            first_token, tokens, length, entry = (
                load_int(sequences, 4 * sequence), load_int(sequences, 4 * sequence + 1),
                load_int(sequences, 4 * sequence + 2), load_int(sequences, 4 * sequence + 3),
            )  # fmt: skip
            rows = min(TILE_ROWS, tokens * group - first_row)
            if rows != shaped:
                shape_attention(rows, key_depth, value_depth)
                shaped = rows
            for r in range(rows):
                token, head = (first_row + r) // group, kv_head * group + (first_row + r) % group
                source, target = query + 2 * ((first_token + token) * query_token + head * query_head), r * key_dim // 4
                for i in range(key_dim // 4):
                    store_int(rows_q, target + i, load_int(source, i))
            # Positions that any row of the tile sees, by whole blocks.
            newest = length - tokens + (first_row + rows - 1) // group
            oldest = max(0, length - tokens + first_row // group - window + 1) if window else 0
            first_block = oldest // size
            blocks = newest // size - first_block + 1
            lanes = blocks * size
            stride = (lanes + APART - 1) // APART * APART + LANES
            weights_stride = stride + LANES
            rows_weights = rows_scores + 4 * TILE_ROWS * stride
            table = tables + 8 * entry
            own_values = values + kv_head * value_head
            tile_scores(
                rows_scores, stride, rows_q, key_dim, key_depth,
                keys + kv_head * key_head, table, kv_heads * key_head, size, first_block, lanes // LANES,
                own_values, kv_heads * value_head, 2 * LANES * width if tokens * group <= TILE_ROWS else 0,
            )  # fmt: skip
            last, in_last = load_int(table, first_block + blocks - 1), newest % size + 1
            last_values = own_values + last * kv_heads * value_head
            if in_last < size:
                _copy_tail(tail, last_values, in_last, size // 2, width)
                last_values = tail
            for r in range(rows):
                position = length - tokens + (first_row + r) // group
                row, scale = rows_scores + 4 * r * stride, own_scale
                if cap > 0 or scale <= 0:
                    _scale_and_cap(row, lanes, scale, cap)
                    scale = ONE
                begin = max(0, position - window + 1) if window else 0
                sink = load(sinks, kv_head * group + (first_row + r) % group, F32) if sinks else NEGATIVE
                total = softmax_row(
                    row, rows_weights + 2 * r * weights_stride, max(0, begin - first_block * size),
                    position - first_block * size + 1, lanes, scale, sink, BF16,
                )  # fmt: skip
                store(rows_q, r, F32, ONE / total)  # the query itself is not needed any more
            tile_values(
                rows_out, width, rows_weights, weights_stride, value_depth,
                own_values, table, kv_heads * value_head, size, first_block, blocks, last_values,
            )  # fmt: skip
            for r in range(rows):
                token, head = (first_row + r) // group, kv_head * group + (first_row + r) % group
                target, inverse = (first_token + token) * out_token + head * out_head, load(rows_q, r, F32)
                whole = value_dim // LANES * LANES
                store_scaled(out + 2 * target, rows_out + 4 * r * width, whole, inverse)
                for d in range(whole, value_dim):
                    store(out, target + d, BF16, load(rows_out, r * width + d, F32) * inverse)
        release_tiles()

    return tile_attend


def tile_scratch_bytes(key_dim: int, width: int, size: int, lanes: int) -> int:
    """Scratch bytes that one worker of `tile_attend` needs if the longest sequence takes `lanes`; whole cache lines."""
    stride = math.ceil(lanes / APART) * APART + LANES
    needed = TILE_ROWS * (2 * key_dim + 4 * width + 4 * stride + 2 * (stride + LANES)) + 2 * size * width
    return math.ceil(needed / LINE) * LINE
