"""Attention of prompts where keys are dear to read: a task has several tiles of rows, which pass over the keys span by span.

A span's keys, and later its values, come once for all tiles from where they lie; where they lie in pairs that have to be widened, that too is done
once. The sums are those of `attention`, in the same order, so that a row's result does not depend on which of the two computes it.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from engine.cpu.kernels.attention import (
    NEGATIVE,
    ONE,
    SCORE_LANES,
    read_queries,
    seen_blocks,
    vectors_of,
    weigh,
    whole_scores,
    write_results,
)
from engine.cpu.kernels.attention_tiles import MAX_VALUE_ROWS, scores, weighted_values
from engine.cpu.kernels.compiled import inlined, kernel
from engine.cpu.kernels.emit import F32, LANES, LINE_BYTES, MAX_ROWS, WIDE_PAIRS, WIDENED, pairing
from engine.cpu.kernels.simd import address_of, as_float, load, load_int, store, store_int, take_ticket
from engine.cpu.kernels.tiles import widen_pairs

LEAST_ROWS = 2 * MAX_ROWS + 1
"""The fewest rows of a sequence that come here: widening a span's pairs costs more than it saves for fewer."""
MOST_TILES = 8
"""Tiles that a task has at most."""
TASKS = 4
"""The fewest tasks of a worker, if there are so many tiles."""
SCORE_BYTES = 1 << 20
"""The most bytes of the scores of a task of several tiles."""
SPAN_KEYS = 256
"""Keys of a span: theirs, and their values, stay in the second cache while the tiles of a task pass over them."""
BOUNDS = 3
"""Numbers that a task keeps of each tile: of the blocks that it sees, counted from the task's first, the first, the one after the last, and the keys in that last block."""
TABLE_BYTES = -(-8 * (BOUNDS * MOST_TILES + SPAN_KEYS // LANES) // LINE_BYTES) * LINE_BYTES
"""Those numbers, and a table of a span's widened blocks, in whole cache lines, so that scores begin one."""


def pays(kind: int, paired: int) -> bool:
    """Whether spans make attention over such a cache faster on this CPU: keys are widened, or twice as long, and few rows share them."""
    return pairing() == WIDE_PAIRS and (paired == WIDE_PAIRS or kind == F32)


@inlined
def score_stride(lanes: int) -> Any:
    """The float32 numbers between two rows of scores: a tile may begin at any 16 of them."""
    return whole_scores(lanes) + SCORE_LANES


@inlined
def _find_bounds(
    bounds: int, rows: int, first_row: int, group: int, before: int, first_block: int, window: int, size: int
) -> None:
    for tile in range((rows + MAX_ROWS - 1) // MAX_ROWS):
        oldest = before + (first_row + tile * MAX_ROWS) // group
        newest = before + (first_row + min(rows, (tile + 1) * MAX_ROWS) - 1) // group
        begin, blocks = seen_blocks(oldest, newest, window, size)
        store_int(bounds, BOUNDS * tile, begin - first_block)
        store_int(bounds, BOUNDS * tile + 1, begin - first_block + blocks)
        store_int(bounds, BOUNDS * tile + 2, newest % size + 1)


@inlined
def _widen_span(out: int, source: int, table: int, blocks: int, stride: int, pairs: int, width: int) -> None:
    """Some blocks of pairs, `stride` numbers apart, found through the table, as float32, [pairs * 2, width] each, behind each other."""
    for i in range(blocks):
        widen_pairs(out + 8 * i * pairs * width, source + 2 * load_int(table, i) * stride, pairs, width)


@cache
def span_attend_kernel(kind: int, paired: int) -> Any:
    """`attend_kernel` for tasks of up to MOST_TILES tiles, over a cache for which it `pays`. Arguments: the same."""
    element, copies = 4 if kind == F32 else 2, paired == WIDE_PAIRS

    @kernel
    def span_attend(data: Any) -> None:
        a = address_of(data)
        tasks, num_tasks, sequences, tables = load_int(a, 2), load_int(a, 3), load_int(a, 4), load_int(a, 5)
        query, query_token, query_head = load_int(a, 8), load_int(a, 9), load_int(a, 10)
        keys, values, kv_heads, group = load_int(a, 11), load_int(a, 12), load_int(a, 13), load_int(a, 14)
        key_dim, value_dim, value_padded = load_int(a, 15), load_int(a, 16), load_int(a, 17)
        size, padded, scale = load_int(a, 18), load_int(a, 19), load_int(a, 20)
        window, cap, sinks = load_int(a, 21), as_float(load_int(a, 22)), load_int(a, 23)
        out, out_token, out_head = load_int(a, 24), load_int(a, 25), load_int(a, 26)
        bounds = load_int(a, 6) + take_ticket(a + 8) * load_int(a, 7)  # this worker's scratch
        numbers, rows_q = bounds + 8 * BOUNDS * MOST_TILES, bounds + TABLE_BYTES
        rows_out = rows_q + 4 * MOST_TILES * MAX_ROWS * key_dim
        rows_scores = rows_out + 4 * MOST_TILES * MAX_ROWS * value_padded
        key_block, value_block = kv_heads * key_dim * padded, kv_heads * size * value_padded
        groups_of_block, span_blocks = padded // LANES, max(SPAN_KEYS // padded, 1)
        if copies:  # widened blocks lie behind each other
            for i in range(span_blocks):
                store_int(numbers, i, i)
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
                rows_q, rows, first_row, group, first_token, kv_head, query, query_token, query_head, key_dim, kind, F32,
            )  # fmt: skip
            newest = before + (first_row + rows - 1) // group
            first_block, blocks = seen_blocks(before + first_row // group, newest, window, size)
            _find_bounds(bounds, rows, first_row, group, before, first_block, window, size)
            stride = score_stride(blocks * padded)
            table, wide = tables + 8 * (entry + first_block), rows_scores + 4 * rows * stride
            head_keys = keys + kv_head * key_dim * padded * element
            head_values = values + kv_head * size * value_padded * element
            for span in range(0, blocks, span_blocks):
                if copies:
                    count = min(span_blocks, blocks - span)
                    _widen_span(wide, head_keys, table + 8 * span, count, key_block, key_dim // 2, padded)
                for first in range(0, rows, MAX_ROWS):
                    bound = bounds + 8 * BOUNDS * (first // MAX_ROWS)
                    begin, end = max(span, load_int(bound, 0)), min(span + span_blocks, load_int(bound, 1))
                    scores(
                        min(MAX_ROWS, rows - first), rows_scores + 4 * (first * stride + begin * padded), stride,
                        rows_q + 4 * first * key_dim, key_dim, wide if copies else head_keys, numbers if copies else table,
                        key_dim * padded if copies else key_block, padded, (begin - span if copies else begin) * groups_of_block,
                        max(end - begin, 0) * groups_of_block, 0, 0, 0, scale, F32, WIDENED,
                    )  # fmt: skip
            for r in range(rows):
                bound, head = bounds + 8 * BOUNDS * (r // MAX_ROWS), kv_head * group + (first_row + r) % group
                begin = load_int(bound, 0)
                row = rows_scores + 4 * (r * stride + begin * padded)
                total = weigh(
                    row, row, before + (first_row + r) // group, first_block + begin, load_int(bound, 1) - begin,
                    window, size, padded, cap, load(sinks, head, F32) if sinks else NEGATIVE, paired, F32,
                )  # fmt: skip
                store(rows_q, r, F32, ONE / total)  # the query itself is not needed any more
            for span in range(0, blocks, span_blocks):
                if copies:
                    count = min(span_blocks, blocks - span)
                    _widen_span(wide, head_values, table + 8 * span, count, value_block, size // 2, value_padded)
                for first in range(0, rows, MAX_ROWS):
                    bound = bounds + 8 * BOUNDS * (first // MAX_ROWS)
                    begin, end = max(span, load_int(bound, 0)), min(span + span_blocks, load_int(bound, 1))
                    if begin >= end:
                        continue
                    in_last = load_int(bound, 2) if end == load_int(bound, 1) else size
                    source = wide + 4 * (begin - span) * size * value_padded if copies else head_values
                    as_one = copies and size == padded  # keys that lie behind each other are those of one block
                    pieces = 1 if as_one else end - begin
                    for r in range(first, min(rows, first + MAX_ROWS), MAX_VALUE_ROWS):
                        here = min(MAX_VALUE_ROWS, min(rows, first + MAX_ROWS) - r)
                        at_once = vectors_of(here)
                        for v in range(0, value_padded // LANES, at_once):
                            weighted_values(
                                here, min(at_once, value_padded // LANES - v), rows_out + 4 * (r * value_padded + v * LANES),
                                value_padded, rows_scores + 4 * (r * stride + begin * padded), stride,
                                source + 4 * v * LANES, numbers if copies else table, size * value_padded if copies else value_block,
                                size, padded, value_padded, 0 if copies else begin, pieces,
                                (end - begin - 1) * size + in_last if as_one else in_last, begin > load_int(bound, 0),
                                keys, table, 0, 0, F32, WIDENED,
                            )  # fmt: skip
            write_results(
                rows_out, rows_q, rows, first_row, group, first_token, kv_head,
                out, out_token, out_head, value_dim, value_padded, kind,
            )  # fmt: skip
            task = take_ticket(a)

    return span_attend


def rows_of_task(lanes: int, tiles: int) -> int:
    """The rows of a task if the longest sequence takes `lanes`, and each worker has so many tiles."""
    return MAX_ROWS * max(1, min(MOST_TILES, tiles // TASKS, SCORE_BYTES // (4 * MAX_ROWS * max(lanes, 1))))


def span_scratch_bytes(key_dim: int, value_padded: int, padded: int, lanes: int, rows: int) -> int:
    """Scratch bytes that one worker of `span_attend` needs if the longest sequence takes `lanes`, in blocks of `padded`, and a task has at
    most so many rows.
    """
    stride: int = score_stride.py_func(lanes)
    copies = max(SPAN_KEYS, padded) * 4 * max(key_dim, value_padded)
    return TABLE_BYTES + 4 * MOST_TILES * MAX_ROWS * (key_dim + value_padded) + 4 * rows * stride + copies
