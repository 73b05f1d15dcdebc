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
from engine.cpu.kernels.compiled import inlined, kernel
from engine.cpu.kernels.emit import (
    BF16,
    DOT_PAIRS,
    F32,
    LANES,
    LINE_BYTES,
    UNPAIRED,
    WIDE_PAIRS,
    WIDENED,
    has_avx512,
    vectors_at_once,
)
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
    store_int,
    take_ticket,
    task_rows,
)
from engine.cpu.kernels.softmax import softmax_row
from engine.cpu.kernels.tiles import MAX_ROWS, widen_pairs

TASK_TILES = 1 if has_avx512() else 8
"""Tiles of rows that a task has at most."""
TASK_ROWS = TASK_TILES * MAX_ROWS
TASKS = 4
"""The fewest tasks of a worker, if there are so many tiles."""
TASK_BYTES = 1 << 20
"""The most bytes of the scores of a task of several tiles."""
SPANNED_ROWS = 2 * MAX_ROWS + 1
"""A task of so many rows passes over spans: widening a span's pairs costs more than it saves for fewer."""
BOUNDS = 3
"""Numbers that a task keeps of each tile: of the blocks that it sees, counted from the task's first, the first, the one after the last, and the keys in that last block."""
SPAN_KEYS = 256
"""Keys of a span: theirs, and their values, stay in the second cache while the tiles of a task pass over them."""
TABLE_BYTES = -(-8 * (BOUNDS * TASK_TILES + SPAN_KEYS // LANES) // LINE_BYTES) * LINE_BYTES
"""Those numbers, and a table of a span's blocks, in whole cache lines, so that scores begin one."""
SCORE_LANES = MOST_GROUPS * LANES
"""Lanes that `scores` writes at once at most, of which some may be behind those that are wanted."""
vectors_of = inlined(vectors_at_once)
ONE, TWO, NEGATIVE = np.float32(1), np.float32(2), np.float32(-1e30)


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
        words = key_dim // 2
        while True:
            first = take_ticket(a) * each
            if first >= rows:
                return
            for row in range(first, min(rows, first + each)):
                slot = load_int(slots, row)
                block, offset = slot // size, slot % size
                for head in range(heads):
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
def _seen(oldest: int, newest: int, window: int, size: int) -> Any:
    """The blocks of the positions that rows from position `oldest` to `newest` see: (the first, their number)."""
    first = max(0, oldest - window + 1) // size if window else 0
    return first, newest // size - first + 1


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
def score_stride(lanes: int) -> int:
    """The float32 numbers between two rows of scores: a tile may begin at any 16 of them, and `scores` writes up to 48 behind its end."""
    return (lanes + 2 * SCORE_LANES - 1) // SCORE_LANES * SCORE_LANES


@inlined
def _widen_span(out: int, source: int, table: int, blocks: int, stride: int, pairs: int, width: int) -> None:
    """Some blocks of pairs, `stride` numbers apart, found through the table, as float32, [pairs * 2, width] each, behind each other."""
    for i in range(blocks):
        widen_pairs(out + 8 * i * pairs * width, source + 2 * load_int(table, i) * stride, pairs, width)


@cache
def attend_kernel(kind: int, paired: int) -> Any:
    """Attention of tasks of query rows; a row is one head of one token.

    The tiles of a task pass over the keys, and then over the values, span by span, so that a span comes once for all of them from
    where it lies, and where its numbers lie in pairs that are widened, that is done once.

    Arguments: tasks, their number ([sequence, kv head, first row, at most TASK_ROWS rows] int64 each); sequences ([first token, tokens, length,
    entry in tables] int64 each); tables [..] int64; scratch: address, bytes a worker; query: address, token stride, head stride; key cache, value cache;
    kv heads, query heads of each, key dim, value dim, padded value dim, block size, padded block size; scale, window
    (0: none), soft-cap (0: none), sinks [heads] float32 (0: none); out: address, token stride, head stride.
    """
    element, pair = 4 if kind == F32 else 2, 1 if paired == UNPAIRED else 2
    factor = BF16 if paired == DOT_PAIRS else F32  # the type of what keys and values are multiplied by
    weight_bytes = 2 if paired == DOT_PAIRS else 4
    copies, spans = paired == WIDE_PAIRS, TASK_TILES > 1 and (paired == WIDE_PAIRS or kind == F32)

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
        bounds = load_int(a, 6) + take_ticket(a + 8) * load_int(a, 7)  # this worker's scratch
        numbers, rows_q = bounds + 8 * BOUNDS * TASK_TILES, bounds + TABLE_BYTES
        rows_out = rows_q + 4 * TASK_ROWS * key_dim
        rows_scores = rows_out + 4 * TASK_ROWS * value_padded
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
            for r in range(rows):
                token, head = (first_row + r) // group, kv_head * group + (first_row + r) % group
                source = (first_token + token) * query_token + head * query_head
                for d in range(key_dim):
                    store(rows_q, r * key_dim + d, factor, load(query, source + d, kind))
            first_block, blocks = _seen(
                before + first_row // group, before + (first_row + rows - 1) // group, window, size
            )
            tiles = (rows + MAX_ROWS - 1) // MAX_ROWS
            for tile in range(tiles):
                newest = before + (first_row + min(rows, (tile + 1) * MAX_ROWS) - 1) // group
                begin, count = _seen(before + (first_row + tile * MAX_ROWS) // group, newest, window, size)
                store_int(bounds, BOUNDS * tile, begin - first_block)
                store_int(bounds, BOUNDS * tile + 1, begin - first_block + count)
                store_int(bounds, BOUNDS * tile + 2, newest % size + 1)
            stride = score_stride(blocks * padded)
            rows_weights = rows_scores + 4 * rows * stride if paired == DOT_PAIRS else rows_scores
            table, head_keys = tables + 8 * (entry + first_block), keys + kv_head * key_dim * padded * element
            head_values = values + kv_head * size * value_padded * element
            in_spans = rows >= SPANNED_ROWS
            span_blocks = max(SPAN_KEYS // padded, 1) if in_spans else blocks
            wide = rows_scores + 4 * rows * stride  # where a span's keys or values lie that were widened
            if copies and in_spans:  # the table of their blocks
                for i in range(span_blocks):
                    store_int(numbers, i, i)
            for span in range(0, blocks, span_blocks):
                if copies and in_spans:
                    count = min(span_blocks, blocks - span)
                    _widen_span(wide, head_keys, table + 8 * span, count, key_block, key_dim // 2, padded)
                for tile in range(tiles):
                    begin = max(span, load_int(bounds, BOUNDS * tile))
                    end, head_row = min(span + span_blocks, load_int(bounds, BOUNDS * tile + 1)), tile * MAX_ROWS
                    here, groups = min(MAX_ROWS, rows - head_row), max(end - begin, 0) * (padded // LANES)
                    own_query, target = (
                        rows_q + weight_bytes * head_row * key_dim,
                        rows_scores + 4 * (head_row * stride + begin * padded),
                    )
                    if spans and in_spans:
                        scores(
                            here, target, stride, own_query, key_dim,
                            wide if copies else head_keys, numbers if copies else table, key_dim * padded if copies else key_block,
                            padded, (begin - span if copies else begin) * (padded // LANES), groups, 0, 0, 0, scale, F32, WIDENED,
                        )  # fmt: skip
                    else:
                        scores(
                            here, target, stride, own_query, key_dim, head_keys, table, key_block,
                            padded, begin * (padded // LANES), groups, head_values, value_block, min(size, LANES) * value_padded,
                            scale, kind, paired,
                        )  # fmt: skip
            for r in range(rows):
                position, tile = before + (first_row + r) // group, r // MAX_ROWS
                begin, end = load_int(bounds, BOUNDS * tile), load_int(bounds, BOUNDS * tile + 1)
                lanes, row = (end - begin) * padded, rows_scores + 4 * (r * stride + begin * padded)
                if cap > 0:
                    _soft_cap(row, lanes, cap)
                oldest = max(0, position - window + 1) if window else 0
                begin_lane = max(0, (oldest // size - first_block - begin) * padded + oldest % size)
                end_lane = (position // size - first_block - begin) * padded + position % size + 1
                head = kv_head * group + (first_row + r) % group
                sink = load(sinks, head, F32) if sinks else NEGATIVE
                if size != padded:
                    _mask(row, lanes, size, padded)
                if paired != UNPAIRED:
                    weights = rows_weights + weight_bytes * (r * stride + begin * padded)
                    total = softmax_row(row, weights, begin_lane, end_lane, lanes, ONE, sink, factor)
                else:
                    total = _softmax(row, begin_lane, end_lane, lanes, sink)
                store(rows_q, r, F32, ONE / total)  # the query itself is not needed any more
            # The next task is taken now, so that its keys come from memory while this one's values are multiplied.
            task = take_ticket(a)
            ahead, ahead_table, ahead_blocks = keys, table, 0
            if task < num_tasks:
                ahead_sequence = load_int(tasks, 4 * task)
                ahead_tokens = load_int(sequences, 4 * ahead_sequence + 1)
                if ahead_tokens * group <= MAX_ROWS:  # else other tiles of rows read them too
                    ahead += load_int(tasks, 4 * task + 1) * key_dim * padded * element
                    last = load_int(sequences, 4 * ahead_sequence + 2) - 1
                    ahead_first, ahead_blocks = _seen(last + 1 - ahead_tokens, last, window, size)
                    ahead_table = tables + 8 * (load_int(sequences, 4 * ahead_sequence + 3) + ahead_first)
            for span in range(0, blocks, span_blocks):
                if copies and in_spans:
                    count = min(span_blocks, blocks - span)
                    _widen_span(wide, head_values, table + 8 * span, count, value_block, size // 2, value_padded)
                for r in range(0, rows, MAX_VALUE_ROWS):
                    bound = bounds + 8 * BOUNDS * (r // MAX_ROWS)
                    begin, end = max(span, load_int(bound, 0)), min(span + span_blocks, load_int(bound, 1))
                    here, count, goes_on = min(MAX_VALUE_ROWS, rows - r), end - begin, begin > load_int(bound, 0)
                    in_last = load_int(bound, 2) if end == load_int(bound, 1) else size
                    at_once = vectors_of(here)
                    for v in range(0, value_padded // LANES if begin < end else 0, at_once):
                        vectors, sums = (
                            min(at_once, value_padded // LANES - v),
                            rows_out + 4 * (r * value_padded + v * LANES),
                        )
                        weights = rows_weights + weight_bytes * (r * stride + begin * padded)
                        if spans and in_spans:
                            as_one = copies and size == padded  # keys that lie behind each other are those of one block
                            weighted_values(
                                here, vectors, sums, value_padded, weights, stride,
                                (wide + 4 * (begin - span) * size * value_padded if copies else head_values) + 4 * v * LANES,
                                numbers if copies else table, size * value_padded if copies else value_block, size, padded, value_padded,
                                0 if copies else begin, 1 if as_one else count, (count - 1) * size + in_last if as_one else in_last, goes_on,
                                keys, table, 0, 0, F32, WIDENED,
                            )  # fmt: skip
                        else:
                            weighted_values(
                                here, vectors, sums, value_padded, weights, stride, head_values + v * LANES * pair * element, table,
                                value_block, size, padded, value_padded, begin, count, in_last, goes_on,
                                ahead + v * LANES * pair * element, ahead_table, key_block, ahead_blocks, kind, paired,
                            )  # fmt: skip
            for r in range(rows):
                token, head = (first_row + r) // group, kv_head * group + (first_row + r) % group
                target = (first_token + token) * out_token + head * out_head
                inverse = load(rows_q, r, F32)
                for d in range(value_dim):
                    store(out, target + d, kind, load(rows_out, r * value_padded + d, F32) * inverse)

    return attend


def rows_of_task(lanes: int, most: int, tiles: int) -> int:
    """The rows of a task if the longest sequence takes `lanes`, the most rows of a sequence are `most`, and each worker has so many tiles."""
    if most < SPANNED_ROWS:
        return MAX_ROWS
    return MAX_ROWS * max(1, min(TASK_TILES, tiles // TASKS, TASK_BYTES // (4 * MAX_ROWS * lanes)))


def scratch_bytes(key_dim: int, value_padded: int, padded: int, lanes: int, most: int) -> int:
    """Scratch bytes that one worker of `attend` needs if the longest sequence takes `lanes`, in blocks of `padded`, and a task has at
    most so many rows.
    """
    stride: int = score_stride.py_func(lanes)
    rows = 4 * TASK_ROWS * (key_dim + value_padded) + 6 * most * stride
    return TABLE_BYTES + rows + max(SPAN_KEYS, padded) * 4 * max(key_dim, value_padded)
