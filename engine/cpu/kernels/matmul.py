"""x W^T + b: weights in panels of 32 columns, each read once, straight through memory, for all rows."""

from __future__ import annotations

from functools import cache
from typing import Any

from engine.cpu.kernels.coded import GROUP_BYTES, GROUP_INPUTS, HEAD_BYTES
from engine.cpu.kernels.compiled import inlined, inlined_with_constants, kernel
from engine.cpu.kernels.emit import BF16, F32, LANES, WIDE_PAIRS, WIDENED, has_avx512
from engine.cpu.kernels.simd import address_of, load, load_int, store, take_ticket
from engine.cpu.kernels.tiles import (
    ADD,
    GATE,
    KEEPING_ROWS,
    MAX_CODED_ROWS,
    ONCE,
    PANEL,
    PRODUCT_ROWS,
    WIDEN,
    product,
    widen_pairs,
)

MOST_DECODING_ROWS = 22
"""With more rows the first tile of a piece decodes a coded panel for all of them, else each for itself."""
WIDENING_ROWS = 0 if has_avx512() else 96
"""With so many rows a panel of pairs is widened once for all tiles (0: never), because on AVX2 widening competes with multiplying."""
PIECES = 16
"""Pieces of the weight for all workers together. With few rows the product is bound by reading the weight, and memory
is read fastest in long runs.
"""
PIECE_BYTES = 1 << 19
"""The most bytes of a piece: a thread that is preempted within a piece delays the others."""
PIECE_PANELS = 3
"""The fewest panels of a piece for a single row tile, if that leaves every worker two pieces."""
MAX_TILES = 4
"""With more row tiles the product is bound by arithmetic, and a piece is a single panel."""
PIECE_TILES = 16
"""Row tiles of a piece of a single panel."""
PIECES_TOGETHER = 16
"""Pieces of panels that multiply some rows before other rows' turn: meanwhile the rows stay in a core's second cache, if they fit it."""
PART_BYTES = 320 << 10
"""Of a panel that several tiles multiply, in one part of the sum. It and the next one must fit into a core's second cache."""


@inlined
def tile_rows(rows: int, coded: int = 0) -> int:
    """The rows of one tile, such that all tiles are of nearly equal size, but for the first of many over a coded panel."""
    most = PRODUCT_ROWS
    if coded:
        rows, most = (rows, MAX_CODED_ROWS) if rows <= MOST_DECODING_ROWS else (rows - KEEPING_ROWS, PRODUCT_ROWS)
    tiles = (rows + most - 1) // most
    return (rows + tiles - 1) // tiles


@inlined
def piece(rows: int, tile: int, panels: int, panel_bytes: int, workers: int) -> Any:
    """The piece of work that a worker takes at a time: (panels of the weight, rows)."""
    if rows <= MAX_TILES * tile:
        least = min(PIECE_PANELS, panels // (2 * workers)) if rows <= tile else 1
        return max(least, min(panels // PIECES, PIECE_BYTES // panel_bytes), 1), rows
    return 1, PIECE_TILES * tile


@inlined
def place(ticket: int, pieces: int, across: int, workers: int) -> Any:
    """Which of the `pieces` of panels, and which of the pieces of rows, `across` for each of those, a ticket stands for. Workers that
    multiply the same rows at the same time do it by panels that lie apart, because neighbours may end in one cache line.
    """
    if across == 1:
        return ticket, 0
    first = ticket // (PIECES_TOGETHER * across) * PIECES_TOGETHER
    together, within = min(PIECES_TOGETHER, pieces - first), ticket - first * across
    turn, run = within % together, within % together % workers
    return first + run * (together // workers) + min(run, together % workers) + turn // workers, within // together


@inlined
def ahead_of(following: int, part_bytes: int, tile: int, tiles: int) -> int:
    """What row tile number `tile` of `tiles` prefetches, half of a part's bytes: the first two tiles prefetch the `following` part, because
    memory would rest while a part is in the cache. The others prefetch nothing (0). A single tile reads its panel ONCE.
    """
    if tiles == 1:
        return ONCE
    return 0 if tile > 1 else following + tile * (part_bytes // 2)


@inlined
def panel_after(panel: int, begin: int, last: int, panels_each: int, across: int, workers: int) -> int:
    """The panel that a worker probably multiplies after this one of its piece, the panels from `begin` to `last`: the next of the piece or
    of its run of panels, else the first of the piece that comes after those of the other workers.
    """
    return panel + 1 if panel + 1 < last or across > 1 else begin + panels_each * workers


WIDENED_ROWS = 16
"""Rows that one worker widens at a time."""


@inlined
def widen_rows(task: int, rows: int, inner: int, source: int, source_stride: int, out: int) -> None:
    """Rows of bfloat16 in float32, [rows, inner] without gaps: those of task number `task`."""
    for row in range(task * WIDENED_ROWS, min(rows, (task + 1) * WIDENED_ROWS)):
        begin, end = source + 2 * row * source_stride, out + 4 * row * inner
        for i in range(inner):
            store(end, i, F32, load(begin, i, BF16))


@cache
def widen_kernel() -> Any:
    """The rows in float32, where a product needs them so. Arguments: see `matmul_kernel`, which comes after it."""

    @kernel
    def widen(data: Any) -> None:
        a = address_of(data)
        rows, inner, x = load_int(a, 2), load_int(a, 3), load_int(a, 5)
        source, source_stride = load_int(a, 12), load_int(a, 13)
        while True:
            task = take_ticket(a)
            if task * WIDENED_ROWS >= rows:
                return
            widen_rows(task, rows, inner, source, source_stride, x)

    return widen


@inlined
def widens(rows: int, paired: int, coded: int) -> bool:
    """Whether a panel of pairs is widened before its products."""
    return paired == WIDE_PAIRS and not coded and 0 < WIDENING_ROWS <= rows


@inlined
def bytes_of_panel(inner: int, element: int, coded: int) -> int:
    """Bytes from one panel of a weight to the next."""
    return HEAD_BYTES + inner // GROUP_INPUTS * GROUP_BYTES if coded else inner * PANEL * element


@inlined
def part_inputs(inner: int, kind: int, widened: bool) -> int:
    """Inputs of a part of the sum where several tiles multiply a panel: all (or more), or a multiple of 32."""
    most = PART_BYTES // (PANEL * (4 if kind == F32 or widened else 2))
    parts = max((inner + most - 1) // most, 1)
    return ((inner + parts - 1) // parts + 31) // 32 * 32


def room_bytes(rows: int, inner: int, kind: int, paired: int, coded: int) -> tuple[int, int]:
    """Bytes of the rooms of `multiply_panel`: for a part of a panel, and for sums."""
    widened = widens.py_func(rows, paired, coded)
    part = part_inputs.py_func(inner, kind, widened)
    bytes_each = 2 if coded else 4 if widened else 0
    return bytes_each * PANEL * part, 4 * PANEL * min(rows, PIECE_TILES * PRODUCT_ROWS) if part < inner else 0


@inlined_with_constants
def multiply_panel(
    head: int, end: int, rows: int, out: int, stride: int, x: int, x_stride: int, packed: int, inner: int,
    begins: int, begin_stride: int, factors: int, column: int, room: int, partial: int, further: int,
    kind: int, paired: int, coded: int, ending: int,
) -> None:  # fmt: skip
    """The rows from `head` to `end`, of a product of `rows`, times one panel, tile by tile; `out` is that of the first row and this panel.

    The sums of row r begin at begins + 4 * r * begin_stride (0: at zero). factors and column: as in `product`, of all rows. room: where a part of a panel
    lies decoded, or widened. further: how many panels further the next one of this worker probably is. A large panel is multiplied in
    parts, each by all rows while it lies in the second cache; partial: where their sums wait, float32 [end - head, 32].
    """
    element = 4 if kind == F32 else 2
    x_bytes = x_stride * (4 if paired == WIDE_PAIRS else element)
    out_bytes = stride * (4 if ending in (ADD, WIDEN) else element)
    tile, widened, decoding = tile_rows(rows, coded), widens(rows, paired, coded), coded and rows <= MOST_DECODING_ROWS
    tiles, part = (end - head + tile - 1) // tile, inner if rows <= tile else part_inputs(inner, kind, widened)
    done, kept_before = 0, 0
    while True:
        last = min(done + part, inner)
        size = (last - done) // GROUP_INPUTS * GROUP_BYTES if coded else (last - done) * PANEL * element
        if last == inner:
            following = packed + further * bytes_of_panel(inner, element, coded)
        elif coded:
            following = packed + HEAD_BYTES + last // GROUP_INPUTS * GROUP_BYTES
        else:
            following = packed + last * PANEL * element
        here = room - done * PANEL * (4 if widened else 2)
        if widened:
            widen_pairs(room, packed + done * PANEL * element, (last - done) // 2, PANEL)
        first, number, kept = head, 0, kept_before
        while first < end:
            keeps = coded and not decoding and first == head
            count = min(KEEPING_ROWS if keeps else tile, end - first)
            target, inputs, into = out + first * out_bytes, x + first * x_bytes, partial + 4 * PANEL * (first - head)
            sums, sums_stride = (into, PANEL) if done else (begins + 4 * first * begin_stride, begin_stride)
            into, scales = 0 if last == inner else into, factors + 8 * first if factors else 0
            ahead = 0 if keeps else ahead_of(following, size, number, tiles)
            if widened:
                product(
                    count, target, stride, inputs, x_stride, here, done, last, sums, sums_stride, into, scales, column, 0, 0, 0,
                    kind, WIDENED, 0, ending,
                )  # fmt: skip
            elif decoding or keeps:
                kept = product(
                    count, target, stride, inputs, x_stride, packed, done, last, sums, sums_stride, into, scales, column, ahead,
                    here if keeps else 0, kept_before, kind, paired, 1, ending,
                )  # fmt: skip
            else:
                product(
                    count, target, stride, inputs, x_stride, here if coded else packed, done, last, sums, sums_stride, into, scales, column,
                    ahead, 0, 0, kind, paired, 0, ending,
                )  # fmt: skip
            first += count
            number += 0 if keeps else 1
        if last == inner:
            return
        done, kept_before = last, kept


@cache
def matmul_kernel(kind: int, paired: int, coded: int, ending: int) -> Any:
    """Arguments: rows, inner, panels; x [rows, inner], its stride; weight [panels, inner, 32], or coded; start (0: none);
    out, its stride; workers; with WIDE_PAIRS what `widen_kernel` makes x of, and its stride; the `room_bytes` of each worker: both rooms, their
    bytes, those of the first one. `ending` is STORE, ADD, GATE or WIDEN.
    """
    element = 4 if kind == F32 else 2
    out_element = 4 if ending in (ADD, WIDEN) else element
    width = LANES if ending == GATE else PANEL

    @kernel
    def matmul(data: Any) -> None:
        a = address_of(data)
        rows, inner, panels = load_int(a, 2), load_int(a, 3), load_int(a, 4)
        x, x_stride, weight = load_int(a, 5), load_int(a, 6), load_int(a, 7)
        start, out, stride = load_int(a, 8), load_int(a, 9), load_int(a, 10)
        workers, tile, panel_bytes = load_int(a, 11), tile_rows(rows, coded), bytes_of_panel(inner, element, coded)
        panels_each, rows_each = piece(rows, tile, panels, panel_bytes, workers)
        room = load_int(a, 14) + take_ticket(a + 8) * load_int(a, 15)
        pieces, across = (panels + panels_each - 1) // panels_each, (rows + rows_each - 1) // rows_each
        while True:
            ticket = take_ticket(a)
            if ticket >= pieces * across:
                return
            panel_piece, row_piece = place(ticket, pieces, across, workers)
            begin, head = panel_piece * panels_each, row_piece * rows_each
            end, last = min(head + rows_each, rows), min(begin + panels_each, panels)
            for panel in range(begin, last):
                further = panel_after(panel, begin, last, panels_each, across, workers) - panel
                multiply_panel(
                    head, end, rows, out + panel * width * out_element, stride, x, x_stride, weight + panel * panel_bytes, inner,
                    start + 4 * panel * PANEL if start else 0, 0, 0, 0, room, room + load_int(a, 16), further, kind, paired, coded, ending,
                )  # fmt: skip

    return matmul
