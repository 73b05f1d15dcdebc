"""Paged attention on the CPU: new keys and values into their blocks, then each query over its sequence's blocks.

Keys lie transposed, `[block, head, dim, padded block size]`, so that one vector holds one component of 16 keys; values
lie `[block, head, block size, padded dim]`. In bfloat16, if dim and block size are even, two components of a key lie side by side,
`[.., dim / 2, padded block size, 2]`, and so do two keys' values, `[.., block size / 2, padded dim, 2]`; weights are rounded to
bfloat16 where the CPU's dot products multiply such pairs. Two passes over the keys with all scores in between, in float32: exact
softmax, and the same sums whatever else is in the batch.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np

from engine.cpu.kernels.attention_tiles import MAX_VALUE_ROWS, MOST_GROUPS, scores, weighted_values
from engine.cpu.kernels.compiled import inlined, inlined_with_constants, kernel
from engine.cpu.kernels.emit import BF16, DOT_PAIRS, F32, LANES, MAX_ROWS, UNPAIRED, vectors_at_once
from engine.cpu.kernels.simd import (
    address_of,
    as_float,
    copy_words,
    exp,
    fill_half,
    largest,
    load,
    load_int,
    store,
    take_ticket,
    task_rows,
)
from engine.cpu.kernels.softmax import softmax_row

SCORE_LANES = MOST_GROUPS * LANES
"""Lanes that `scores` writes at once at most, of which some may be behind those that are wanted."""
vectors_of = inlined(vectors_at_once)
ONE, TWO, NEGATIVE = np.float32(1), np.float32(2), np.float32(-1e30)


@inlined
def whole_scores(lanes: int) -> int:
    """The float32 numbers that `scores` writes to a row for so many keys."""
    return (lanes + SCORE_LANES - 1) // SCORE_LANES * SCORE_LANES


@cache
def write_kernel(kind: int, paired: int) -> Any:
    """Store rows of keys and values.

    Arguments: rows, slots [rows] int64, heads, block size, padded block size; key: address, row stride, head stride,
    dim, cache; value: the same, with the padded dim before the cache.
    """

    @kernel
    def write_kv(data: Any) -> None:
        a = address_of(data)
        rows, slots, heads, size, padded = (
            load_int(a, 2),
            load_int(a, 3),
            load_int(a, 4),
            load_int(a, 5),
            load_int(a, 6),
        )
        key, key_row, key_head, key_dim, keys = (
            load_int(a, 7), load_int(a, 8), load_int(a, 9), load_int(a, 10), load_int(a, 11),
        )  # fmt: skip
        value, value_row, value_head, value_dim, value_padded, values = (
            load_int(a, 12), load_int(a, 13), load_int(a, 14), load_int(a, 15), load_int(a, 16), load_int(a, 17),
        )  # fmt: skip
        each = task_rows(rows)
        if each >= LANES // 4:  # a prompt's: two workers seldom write to one block
            each = (each + LANES - 1) // LANES * LANES
        words = key_dim // 2
        while True:
            first = take_ticket(a) * each
            if first >= rows:
                return
            # Head by head: a block's keys and values of one head fit the first cache while the task's rows are put beside each other there.
            for head in range(heads):
                for row in range(first, min(rows, first + each)):
                    slot = load_int(slots, row)
                    block, offset = slot // size, slot % size
                    source = row * key_row + head * key_head
                    target = (block * heads + head) * key_dim * padded
                    if paired:
                        copy_words(keys + 2 * target + 4 * offset, padded, key + 2 * source, words)
                    else:
                        for d in range(key_dim):
                            store(keys, target + d * padded + offset, kind, load(key, source + d, kind))
                    source = row * value_row + head * value_head
                    target = (block * heads + head) * size * value_padded
                    if paired:
                        pair = values + 2 * target + 4 * (offset // 2) * value_padded
                        fill_half(pair, offset % 2, value + 2 * source, value_dim)
                    else:
                        for d in range(value_dim):
                            store(values, target + offset * value_padded + d, kind, load(value, source + d, kind))

    return write_kv


@inlined
def _soft_cap(row: int, lanes: int, cap: Any) -> None:
    for i in range(lanes):
        doubled = exp(min(load(row, i, F32) * (TWO / cap), np.float32(80)))
        store(row, i, F32, cap * (ONE - TWO / (doubled + ONE)))


@inlined
def _mask(row: int, lanes: int, size: int, padded: int) -> None:
    """Give lanes without a key no weight."""
    for block in range(lanes // padded):
        for i in range(block * padded + size, (block + 1) * padded):
            store(row, i, F32, NEGATIVE)


@inlined
def _softmax(row: int, begin: int, end: int, lanes: int, sink: Any) -> Any:
    """Weights, not yet divided by their sum, in place of the scores from `begin` to `end`, and 0 elsewhere. Returns the sum, with the
    sink's part.
    """
    highest = max(largest(row, begin, end), sink)
    total = exp(sink - highest) if sink > NEGATIVE else np.float32(0)
    for i in range(begin):
        store(row, i, F32, np.float32(0))
    for i in range(begin, end):
        weight = exp(load(row, i, F32) - highest)
        total += weight
        store(row, i, F32, weight)
    for i in range(end, lanes):
        store(row, i, F32, np.float32(0))
    return total


@inlined
def seen_blocks(oldest: int, newest: int, window: int, size: int) -> Any:
    """The blocks of the positions that rows from position `oldest` to `newest` see: (the first, their number)."""
    first = max(0, oldest - window + 1) // size if window else 0
    return first, newest // size - first + 1


@inlined_with_constants
def read_queries(
    rows_q: int, rows: int, first_row: int, group: int, first_token: int, kv_head: int,
    query: int, query_token: int, query_head: int, key_dim: int, kind: int, factor: int,
) -> None:  # fmt: skip
    """Copy a task's query rows, [rows, key dim] of the type `factor`."""
    for r in range(rows):
        token, head = (first_row + r) // group, kv_head * group + (first_row + r) % group
        source = (first_token + token) * query_token + head * query_head
        for d in range(key_dim):
            store(rows_q, r * key_dim + d, factor, load(query, source + d, kind))


@inlined_with_constants
def weigh(
    row: int, weights: int, position: int, begin: int, blocks: int, window: int, size: int, padded: int, cap: Any, sink: Any,
    paired: int, factor: int,
) -> Any:  # fmt: skip
    """Turn the scores of the query at `position`, with the keys of so many blocks from block `begin` of its sequence on, into weights of the
    type `factor`; without pairs they are float32, in the scores' place. Returns their sum.
    """
    lanes = blocks * padded
    oldest = max(0, position - window + 1) if window else 0
    first = max(0, (oldest // size - begin) * padded + oldest % size)
    last = (position // size - begin) * padded + position % size
    if cap > 0:
        _soft_cap(row, lanes, cap)
    if size != padded:
        _mask(row, lanes, size, padded)
    if paired != UNPAIRED:
        return softmax_row(row, weights, first, last + 1, lanes, ONE, sink, factor)
    return _softmax(row, first, last + 1, lanes, sink)


@inlined_with_constants
def write_results(
    rows_out: int, inverses: int, rows: int, first_row: int, group: int, first_token: int, kv_head: int,
    out: int, out_token: int, out_head: int, value_dim: int, value_padded: int, kind: int,
) -> None:  # fmt: skip
    """Store a task's sums of values [rows, padded value dim], times one over the sum of their weights [rows], float32."""
    for r in range(rows):
        token, head = (first_row + r) // group, kv_head * group + (first_row + r) % group
        target = (first_token + token) * out_token + head * out_head
        inverse = load(inverses, r, F32)
        for d in range(value_dim):
            store(out, target + d, kind, load(rows_out, r * value_padded + d, F32) * inverse)


@cache
def attend_kernel(kind: int, paired: int) -> Any:
    """Attention of tasks of query rows; a row is one head of one token.

    Arguments: tasks, their number ([sequence, kv head, first row, at most MAX_ROWS rows] int64 each); sequences ([first token, tokens, length,
    entry in tables] int64 each); tables [..] int64; scratch: address, bytes a worker; query: address, token stride, head stride; key cache, value cache;
    kv heads, query heads of each, key dim, value dim, padded value dim, block size, padded block size; scale, window
    (0: none), soft-cap (0: none), sinks [heads] float32 (0: none); out: address, token stride, head stride.
    """
    element, pair = 4 if kind == F32 else 2, 1 if paired == UNPAIRED else 2
    factor = BF16 if paired == DOT_PAIRS else F32  # the type of what keys and values are multiplied by
    weight_bytes = 2 if paired == DOT_PAIRS else 4

    @kernel
    def attend(data: Any) -> None:
        a = address_of(data)
        tasks, num_tasks, sequences, tables = load_int(a, 2), load_int(a, 3), load_int(a, 4), load_int(a, 5)
        query, query_token, query_head = load_int(a, 8), load_int(a, 9), load_int(a, 10)
        keys, values, kv_heads, group = load_int(a, 11), load_int(a, 12), load_int(a, 13), load_int(a, 14)
        key_dim, value_dim, value_padded = load_int(a, 15), load_int(a, 16), load_int(a, 17)
        size, padded, scale = load_int(a, 18), load_int(a, 19), load_int(a, 20)
        window, cap, sinks = load_int(a, 21), as_float(load_int(a, 22)), load_int(a, 23)
        out, out_token, out_head = load_int(a, 24), load_int(a, 25), load_int(a, 26)
        rows_q = load_int(a, 6) + take_ticket(a + 8) * load_int(a, 7)  # this worker's scratch
        rows_out = rows_q + 4 * MAX_ROWS * key_dim
        rows_scores = rows_out + 4 * MAX_ROWS * value_padded
        key_block, value_block = kv_heads * key_dim * padded, kv_heads * size * value_padded
        task = take_ticket(a)
        while task < num_tasks:
            sequence, kv_head, first_row, rows = (
                load_int(tasks, 4 * task), load_int(tasks, 4 * task + 1), load_int(tasks, 4 * task + 2), load_int(tasks, 4 * task + 3),
            )  # fmt: skip
            first_token, tokens, length, entry = (
                load_int(sequences, 4 * sequence), load_int(sequences, 4 * sequence + 1),
                load_int(sequences, 4 * sequence + 2), load_int(sequences, 4 * sequence + 3),
            )  # fmt: skip
            before = length - tokens
            read_queries(
                rows_q, rows, first_row, group, first_token, kv_head, query, query_token, query_head, key_dim, kind, factor,
            )  # fmt: skip
            newest = before + (first_row + rows - 1) // group
            first_block, blocks = seen_blocks(before + first_row // group, newest, window, size)
            stride = whole_scores(blocks * padded)
            rows_weights = rows_scores + 4 * MAX_ROWS * stride if paired == DOT_PAIRS else rows_scores
            table = tables + 8 * entry
            scores(
                rows, rows_scores, stride, rows_q, key_dim, keys + kv_head * key_dim * padded * element, table, key_block,
                padded, first_block * (padded // LANES), blocks * (padded // LANES),
                values + kv_head * size * value_padded * element, value_block, min(size, LANES) * value_padded, scale, kind, paired,
            )  # fmt: skip
            for r in range(rows):
                head = kv_head * group + (first_row + r) % group
                total = weigh(
                    rows_scores + 4 * r * stride, rows_weights + weight_bytes * r * stride, before + (first_row + r) // group,
                    first_block, blocks, window, size, padded, cap, load(sinks, head, F32) if sinks else NEGATIVE, paired, factor,
                )  # fmt: skip
                store(rows_q, r, F32, ONE / total)  # the query itself is not needed any more
            # The next task is taken now, so that its keys come from memory while this one's values are multiplied.
            task = take_ticket(a)
            ahead, ahead_table, ahead_blocks = keys, table, 0
            if task < num_tasks:
                ahead_sequence = load_int(tasks, 4 * task)
                ahead_tokens = load_int(sequences, 4 * ahead_sequence + 1)
                if ahead_tokens * group <= MAX_ROWS:  # else other tasks read them too
                    ahead += load_int(tasks, 4 * task + 1) * key_dim * padded * element
                    last = load_int(sequences, 4 * ahead_sequence + 2) - 1
                    ahead_first, ahead_blocks = seen_blocks(last + 1 - ahead_tokens, last, window, size)
                    ahead_table = tables + 8 * (load_int(sequences, 4 * ahead_sequence + 3) + ahead_first)
            for r in range(0, rows, MAX_VALUE_ROWS):
                here = min(MAX_VALUE_ROWS, rows - r)
                at_once = vectors_of(here)
                for v in range(0, value_padded // LANES, at_once):
                    weighted_values(
                        here, min(at_once, value_padded // LANES - v),
                        rows_out + 4 * (r * value_padded + v * LANES), value_padded, rows_weights + weight_bytes * r * stride, stride,
                        values + (kv_head * size * value_padded + v * LANES * pair) * element, table,
                        value_block, size, padded, value_padded, first_block, blocks, newest % size + 1, 0,
                        ahead + v * LANES * pair * element, ahead_table, key_block, ahead_blocks, kind, paired,
                    )  # fmt: skip
            write_results(
                rows_out, rows_q, rows, first_row, group, first_token, kv_head,
                out, out_token, out_head, value_dim, value_padded, kind,
            )  # fmt: skip

    return attend


def scratch_bytes(key_dim: int, value_padded: int, lanes: int) -> int:
    """Scratch bytes that one worker of `attend` needs if the longest sequence takes `lanes`."""
    stride: int = whole_scores.py_func(lanes)
    return MAX_ROWS * (4 * (key_dim + value_padded + stride) + 2 * stride)
