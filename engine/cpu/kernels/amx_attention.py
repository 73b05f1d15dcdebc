"""Paged attention in AMX tiles: up to 32 query rows at a time, over one span of a sequence's keys after another.

A span begins at the same position whatever the step computes. Its scores stand in float32 between the two products; what was added
up before it is scaled to the greatest score so far. So a row's sums have one order whatever the other rows are.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np

from engine.cpu.kernels.amx import LINE, TILE_ROWS
from engine.cpu.kernels.amx_attention_tiles import (
    TASK_ROWS,
    scale_row,
    shape_attention,
    store_scaled,
    tile_scores,
    tile_values,
)
from engine.cpu.kernels.amx_product import release_tiles
from engine.cpu.kernels.compiled import inlined, kernel
from engine.cpu.kernels.emit import BF16, F32, LANES
from engine.cpu.kernels.simd import address_of, as_float, exp, load, load_int, store, store_int, take_ticket
from engine.cpu.kernels.span_softmax import SPAN, raise_greatest, span_greatest, span_weights

ZERO, ONE, TWO, NEGATIVE = np.float32(0), np.float32(1), np.float32(2), np.float32(-1e30)
FIRST_KEYS = 0x0000FFFF0000FFFF
"""A mask for two pairs of 16-bit values. It keeps the lower half of each pair, which is the value of the pair's first key."""
APART = 4 * LANES
"""Rows of scores are multiples of this and 16 more apart, those of weights 32 more: an odd number of cache lines each, so that
the rows of a tile do not meet in the same places of the cache.
"""


@inlined
def span_blocks(size: int) -> int:
    """The blocks of a span, which has at most SPAN keys if a block has not more."""
    return max(1, SPAN // size)


@inlined
def score_stride(lanes: int) -> int:
    """The float32 numbers between two rows of scores."""
    return (lanes + APART - 1) // APART * APART + LANES


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
    sequence, kv_head = load_int(tasks, 4 * task), load_int(tasks, 4 * task + 1)
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
                load_int(tasks, 4 * task), load_int(tasks, 4 * task + 1), load_int(tasks, 4 * task + 2),
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
                span_greatest(found, rows, rows_scores, stride, bounds, base, span * size, scale)
                changed = raise_greatest(greatest, found, factors, TASK_ROWS // LANES)
                span_weights(
                    rows_weights, weights_stride, totals, factors, greatest,
                    rows, rows_scores, stride, bounds, base, span * size, skipped, (end_block - span_first) * size, scale,
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
    lanes: int = span_blocks.py_func(size) * size
    stride: int = score_stride.py_func(lanes)
    needed = TASK_ROWS * (2 * key_dim + 4 * width + 32 + 4 * stride + 2 * (stride + LANES)) + 2 * size * width
    needed += 16 * ((lanes + 2 * size) // LANES + 2)  # places
    return -(-needed // LINE) * LINE
