"""x W^T + b: weights in panels of 32 columns, each read once, straight through memory, for all rows."""

from __future__ import annotations

from functools import cache
from typing import Any

from engine.cpu.kernels.compiled import inlined, kernel
from engine.cpu.kernels.emit import F32, LANES
from engine.cpu.kernels.simd import address_of, load_int, take_ticket
from engine.cpu.kernels.tiles import ADD, GATE, MAX_ROWS, PANEL, WIDEN, product

PIECES = 16
"""Pieces of the weight for all workers together. With few rows the product is bound by reading the weight, and memory
is read fastest in long runs.
"""
PIECE_BYTES = 1 << 19
"""The most bytes of a piece: a thread that is preempted within a piece delays the others."""
MAX_TILES = 4
"""With more row tiles the product is bound by arithmetic, and a piece is a single panel."""
PIECE_TILES = 16
"""Row tiles of a piece of a single panel."""


@inlined
def tile_rows(rows: int) -> int:
    """The rows of one tile, such that all tiles are of nearly equal size."""
    tiles = (rows + MAX_ROWS - 1) // MAX_ROWS
    return (rows + tiles - 1) // tiles


@inlined
def piece(rows: int, tile: int, panels: int, panel_bytes: int) -> Any:
    """The piece of work that a worker takes at a time: (panels of the weight, rows)."""
    if rows <= MAX_TILES * tile:
        return max(1, min(panels // PIECES, PIECE_BYTES // panel_bytes)), rows
    return 1, PIECE_TILES * tile


@cache
def matmul_kernel(kind: int, paired: int, ending: int) -> Any:
    """Arguments: rows, inner, panels; x [rows, inner], its stride; weight [panels, inner, 32]; start (0: none);
    out, its stride. `ending` is STORE, ADD, GATE or WIDEN.
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
        tile = tile_rows(rows)
        panels_each, rows_each = piece(rows, tile, panels, inner * PANEL * element)
        across = (rows + rows_each - 1) // rows_each
        while True:
            ticket = take_ticket(a)
            begin, head = ticket // across * panels_each, ticket % across * rows_each
            if begin >= panels:
                return
            for panel in range(begin, min(begin + panels_each, panels)):
                for first in range(head, min(head + rows_each, rows), tile):
                    product(
                        min(tile, rows - first), out + (first * stride + panel * width) * out_element, stride,
                        x + first * x_stride * element, x_stride, weight + panel * inner * PANEL * element, inner,
                        start + 4 * panel * PANEL if start else 0, 0, 0, 0, kind, paired, ending,
                    )  # fmt: skip

    return matmul
