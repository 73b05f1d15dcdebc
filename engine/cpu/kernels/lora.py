"""x W^T + b where segments of rows have adapters: each segment's sums begin at x A^T B^T instead of at zero.

First all workers share out x A^T; when it is whole, each panel of the weight begins at its part of the second product.
Two kernels that one call runs, because another call costs as much as a small adapter does.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from engine.cpu.kernels.compiled import kernel
from engine.cpu.kernels.emit import F32, LANES, WIDE_PAIRS
from engine.cpu.kernels.low_rank import DOT_RANKS, DOT_ROWS, dots, expand
from engine.cpu.kernels.matmul import (
    MOST_DECODING_ROWS,
    WIDENED_ROWS,
    ahead_of,
    apart,
    bytes_of_panel,
    piece,
    tile_rows,
    widen_rows,
)
from engine.cpu.kernels.simd import address_of, fetch_ahead, load_int, take_ticket
from engine.cpu.kernels.tiles import ADD, GATE, KEEPING_ROWS, MAX_ROWS, PANEL, WIDEN, product

FIELDS = 8
"""A segment: first row, rows, A (`ops.pack_ranks`), ranks (0: no adapter), packed B [panels, depth, 32], depth, halves, start.

halves: int64 [panels, 2], where in the row of `low` the ranks of each half panel's 16 columns begin; -1: nothing is
added to the panel. start: float32 [panels * 32], the initial values of the sums apart from that (0: zero).
"""
TASK_ROWS, TASK_RANKS = 48, 16
"""What one worker takes of x A^T at a time."""


@cache
def low_rank_kernel(kind: int, paired: int, wide: bool) -> Any:
    """Each segment's x A^T, and where `wide` the rows of x in float32. Arguments: see `adapted_kernel`, which comes after it."""
    element, segment_bytes = 4 if kind == F32 else 2, 8 * FIELDS

    @kernel
    def low_rank(data: Any) -> None:
        a = address_of(data)
        inner, x, x_stride = load_int(a, 3), load_int(a, 5), load_int(a, 6)
        segments, number, low, low_stride = load_int(a, 11), load_int(a, 12), load_int(a, 13), load_int(a, 14)
        end = segments + segment_bytes * number
        rows = load_int(a, 2)
        widenings = (rows + WIDENED_ROWS - 1) // WIDENED_ROWS if wide else 0
        while True:
            ticket = take_ticket(a)
            if ticket < widenings:
                widen_rows(ticket, rows, inner, x, x_stride, load_int(a, 18))
                continue
            ticket -= widenings
            segment = segments
            across = 0
            while segment < end:
                across = (load_int(segment, 3) + TASK_RANKS - 1) // TASK_RANKS
                count = (load_int(segment, 1) + TASK_ROWS - 1) // TASK_ROWS * across
                if ticket < count:
                    break
                ticket -= count
                segment += segment_bytes
            if segment >= end:
                return
            head, last = load_int(segment, 0), load_int(segment, 0) + load_int(segment, 1)
            head += ticket // across * TASK_ROWS
            rank = ticket % across * TASK_RANKS
            most = min(rank + TASK_RANKS, load_int(segment, 3))
            for first in range(head, min(head + TASK_ROWS, last), DOT_ROWS):
                for k in range(rank, most, DOT_RANKS):
                    if first == head and k + DOT_RANKS < most:  # rows of A are too short for the CPU to see them coming
                        fetch_ahead(load_int(segment, 2) + (k + DOT_RANKS) * inner * element, DOT_RANKS * inner, kind)
                    dots(
                        min(DOT_ROWS, min(head + TASK_ROWS, last) - first), min(DOT_RANKS, most - k),
                        low + (first * low_stride + k) * element, low_stride, x + first * x_stride * element, x_stride,
                        load_int(segment, 2) + k * inner * element, inner, kind, paired,
                    )  # fmt: skip

    return low_rank


@cache
def adapted_kernel(kind: int, paired: int, coded: int, ending: int) -> Any:
    """Arguments: rows, inner, panels; x, its stride; weight [panels, inner, 32], or coded; out, its stride; factors (0: none); segments,
    their number; low, as `low_rank_kernel` left it, its stride; scratch for sums and where coded a panel, bytes a worker; workers; with WIDE_PAIRS x in float32, [rows, inner] without gaps.
    """
    element = 4 if kind == F32 else 2
    wide = paired == WIDE_PAIRS
    x_element = 4 if wide else element
    out_element = 4 if ending in (ADD, WIDEN) else element
    width = LANES if ending == GATE else PANEL
    segment_bytes = 8 * FIELDS

    @kernel
    def adapted(data: Any) -> None:
        a = address_of(data)
        rows, inner, panels = load_int(a, 2), load_int(a, 3), load_int(a, 4)
        x, x_stride, weight = load_int(a, 5), load_int(a, 6), load_int(a, 7)
        out, stride, factors = load_int(a, 8), load_int(a, 9), load_int(a, 10)
        segments, end = load_int(a, 11), load_int(a, 11) + segment_bytes * load_int(a, 12)
        low, low_stride = load_int(a, 13), load_int(a, 14)
        if wide:
            x, x_stride = load_int(a, 18), inner
        scratch = load_int(a, 15) + take_ticket(a + 8) * load_int(a, 16)
        tile = tile_rows(rows, coded)
        panel_bytes, tiles = bytes_of_panel(inner, element, coded), (rows + tile - 1) // tile
        panels_each, _ = piece(rows, tile, panels, panel_bytes, load_int(a, 17))
        further = apart(panels_each, load_int(a, 17))
        while True:
            begin = take_ticket(a) * panels_each
            if begin >= panels:
                break
            last = min(begin + panels_each, panels)
            for panel in range(begin, last):
                # After the last panel of a piece, this worker's next piece probably comes after those of the other workers.
                following = panel + 1 if panel + 1 < last else begin + panels_each * load_int(a, 17)
                for segment in range(segments, end, segment_bytes):
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
                packed = columns = weight + panel * panel_bytes
                first = number = 0
                if coded and rows > MOST_DECODING_ROWS:
                    columns, first = scratch + 4 * rows * PANEL, KEEPING_ROWS
                    product(
                        first, out + panel * width * out_element, stride, x, x_stride, packed, inner, scratch, PANEL, factors,
                        panel * PANEL, 0, columns, kind, paired, 1, ending,
                    )  # fmt: skip
                while first < rows:
                    count, target = min(tile, rows - first), out + (first * stride + panel * width) * out_element
                    part, ahead = (
                        x + first * x_stride * x_element,
                        ahead_of(packed, panel_bytes, further, number, tiles),
                    )
                    begins, scales = scratch + 4 * first * PANEL, factors + 8 * first if factors else 0
                    if coded and rows <= MOST_DECODING_ROWS:
                        product(
                            count, target, stride, part, x_stride, packed, inner, begins, PANEL, scales, panel * PANEL, ahead, 0,
                            kind, paired, 1, ending,
                        )  # fmt: skip
                    else:
                        product(
                            count, target, stride, part, x_stride, columns, inner, begins, PANEL, scales, panel * PANEL, ahead, 0,
                            kind, paired, 0, ending,
                        )  # fmt: skip
                    first += tile
                    number += 1

    return adapted
