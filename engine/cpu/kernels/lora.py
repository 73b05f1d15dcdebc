"""x W^T + b where segments of rows have adapters: each segment's sums begin at x A^T B^T instead of at zero.

First all workers share out x A^T; when it is whole, each panel of the weight begins at its part of the second product.
Two kernels that one call runs, because another call costs as much as a small adapter does.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from engine.cpu.kernels.compiled import inlined, kernel
from engine.cpu.kernels.emit import F32, LANES, MAX_ROWS, WIDE_PAIRS
from engine.cpu.kernels.low_rank import DOT_RANKS, DOT_ROWS, dots, expand
from engine.cpu.kernels.matmul import (
    WIDENED_ROWS,
    bytes_of_panel,
    multiply_panel,
    panel_after,
    piece,
    tile_rows,
    widen_rows,
)
from engine.cpu.kernels.simd import address_of, fetch_ahead, load_int, take_ticket
from engine.cpu.kernels.tiles import ADD, GATE, PANEL, WIDEN

FIELDS = 8
"""A segment: first row, rows, A (`ops.pack_ranks`), ranks (0: no adapter), packed B [panels, depth, 32], depth, halves, start.

halves: int64 [panels, 2], where in the row of `low` the ranks of each half panel's 16 columns begin; -1: nothing is
added to the panel. start: float32 [panels * 32], the initial values of the sums apart from that (0: zero).
"""
RANKS = 3
"""The field of the ranks."""
SEGMENT_BYTES = 8 * FIELDS
TASK_ROWS, TASK_RANKS = 48, 16
"""What one worker takes of x A^T at a time."""


@inlined
def low_rank_task(ticket: int, segments: int, end: int, most_rows: int, most_ranks: int) -> tuple[int, int, int, int]:
    """Task number `ticket` of all segments' x A^T, of at most so many rows and ranks each: (the segment, or `end` if there is no such
    task; its first row, the row after its last one, its first rank).
    """
    segment = segments
    while segment < end:
        across = (load_int(segment, 3) + most_ranks - 1) // most_ranks
        count = (load_int(segment, 1) + most_rows - 1) // most_rows * across
        if ticket < count:
            head = load_int(segment, 0) + ticket // across * most_rows
            last = min(head + most_rows, load_int(segment, 0) + load_int(segment, 1))
            return segment, head, last, ticket % across * most_ranks
        ticket -= count
        segment += SEGMENT_BYTES
    return end, 0, 0, 0


@cache
def low_rank_kernel(kind: int, paired: int, wide: bool) -> Any:
    """Each segment's x A^T, and where `wide` the rows of x in float32. Arguments: see `adapted_kernel`, which comes after it."""
    element = 4 if kind == F32 else 2

    @kernel
    def low_rank(data: Any) -> None:
        a = address_of(data)
        inner, x, x_stride = load_int(a, 3), load_int(a, 5), load_int(a, 6)
        segments, number, low, low_stride = load_int(a, 11), load_int(a, 12), load_int(a, 13), load_int(a, 14)
        end = segments + SEGMENT_BYTES * number
        rows = load_int(a, 2)
        widenings = (rows + WIDENED_ROWS - 1) // WIDENED_ROWS if wide else 0
        while True:
            ticket = take_ticket(a)
            if ticket < widenings:
                widen_rows(ticket, rows, inner, x, x_stride, load_int(a, 18))
                continue
            ticket -= widenings
            segment, head, last, rank = low_rank_task(ticket, segments, end, TASK_ROWS, TASK_RANKS)
            if segment >= end:
                return
            most = min(rank + TASK_RANKS, load_int(segment, 3))
            for first in range(head, last, DOT_ROWS):
                for k in range(rank, most, DOT_RANKS):
                    if first == head and k + DOT_RANKS < most:  # rows of A are too short for the CPU to see them coming
                        fetch_ahead(load_int(segment, 2) + (k + DOT_RANKS) * inner * element, DOT_RANKS * inner, kind)
                    dots(
                        min(DOT_ROWS, last - first), min(DOT_RANKS, most - k),
                        low + (first * low_stride + k) * element, low_stride, x + first * x_stride * element, x_stride,
                        load_int(segment, 2) + k * inner * element, inner, kind, paired,
                    )  # fmt: skip

    return low_rank


@cache
def adapted_kernel(kind: int, paired: int, coded: int, ending: int) -> Any:
    """Arguments: rows, inner, panels; x, its stride; weight [panels, inner, 32], or coded; out, its stride; factors (0: none); segments,
    their number; low, as `low_rank_kernel` left it, its stride; scratch for sums and where coded, or where it `widens`, a part of a panel, bytes a worker; workers; with WIDE_PAIRS x in float32, [rows, inner] without gaps.
    """
    element = 4 if kind == F32 else 2
    wide = paired == WIDE_PAIRS
    out_element = 4 if ending in (ADD, WIDEN) else element
    width = LANES if ending == GATE else PANEL

    @kernel
    def adapted(data: Any) -> None:
        a = address_of(data)
        rows, inner, panels = load_int(a, 2), load_int(a, 3), load_int(a, 4)
        x, x_stride, weight = load_int(a, 5), load_int(a, 6), load_int(a, 7)
        out, stride, factors = load_int(a, 8), load_int(a, 9), load_int(a, 10)
        segments, end = load_int(a, 11), load_int(a, 11) + SEGMENT_BYTES * load_int(a, 12)
        low, low_stride = load_int(a, 13), load_int(a, 14)
        if wide:
            x, x_stride = load_int(a, 18), inner
        scratch = load_int(a, 15) + take_ticket(a + 8) * load_int(a, 16)
        tile = tile_rows(rows, coded)
        panel_bytes = bytes_of_panel(inner, element, coded)
        panels_each, _ = piece(rows, tile, panels, panel_bytes, load_int(a, 17))
        while True:
            begin = take_ticket(a) * panels_each
            if begin >= panels:
                break
            last = min(begin + panels_each, panels)
            for panel in range(begin, last):
                following = panel_after(panel, begin, last, panels_each, 1, load_int(a, 17))
                for segment in range(segments, end, SEGMENT_BYTES):
                    head, count, depth = load_int(segment, 0), load_int(segment, 1), load_int(segment, 5)
                    halves, own = load_int(segment, 6) + 16 * panel, load_int(segment, 7)
                    if load_int(segment, 3) == 0 or load_int(halves, 0) < 0:
                        halves, depth = segments, 0
                    b = load_int(segment, 4) + panel * depth * PANEL * element
                    if depth and following < panels:
                        fetch_ahead(load_int(segment, 4) + following * depth * PANEL * element, depth * PANEL, kind)
                        fetch_ahead(load_int(segment, 6) + 16 * following, 16 // element, kind)
                    for first in range(head, head + count, MAX_ROWS):
                        expand(
                            min(MAX_ROWS, head + count - first), scratch + 4 * first * PANEL, PANEL,
                            low + first * low_stride * element, low_stride, load_int(halves, 0), load_int(halves, 1),
                            b, depth, own + 4 * panel * PANEL if own else 0, kind, paired,
                        )  # fmt: skip
                multiply_panel(
                    0, rows, rows, out + panel * width * out_element, stride, x, x_stride, weight + panel * panel_bytes, inner,
                    scratch, PANEL, factors, panel * PANEL, scratch + 4 * rows * PANEL, scratch, following - panel, kind, paired, coded, ending,
                )  # fmt: skip

    return adapted
