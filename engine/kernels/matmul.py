"""x W^T + b for a few rows: weights in panels of 32 columns, read once, straight through memory."""

from __future__ import annotations

from functools import cache
from typing import Any

from engine.kernels.compiled import kernel
from engine.kernels.emit import F32
from engine.kernels.simd import address_of, load_int, take_ticket
from engine.kernels.tiles import MAX_ROWS, PANEL, product

PIECES = 16
"""A few rows take as long as reading the weight does, and memory is read fastest in long runs: so many for all."""


@cache
def matmul_kernel(kind: int, paired: int) -> Any:
    """Arguments: rows, inner, panels; x [rows, inner]; weight [panels, inner, 32]; bias (0: none); out, its stride."""
    element = 4 if kind == F32 else 2
    pieces = PIECES

    @kernel
    def matmul(data):
        a = address_of(data)
        rows, inner, panels = load_int(a, 2), load_int(a, 3), load_int(a, 4)
        x, weight, bias, out, stride = load_int(a, 5), load_int(a, 6), load_int(a, 7), load_int(a, 8), load_int(a, 9)
        tiles = (rows + MAX_ROWS - 1) // MAX_ROWS
        tile = (rows + tiles - 1) // tiles
        each = max(1, panels // pieces) if tiles == 1 else 1
        while True:
            begin = take_ticket(a) * each
            if begin >= panels:
                return
            for panel in range(begin, min(begin + each, panels)):
                for first in range(0, rows, tile):
                    product(
                        min(tile, rows - first), out + (first * stride + panel * PANEL) * element, stride,
                        x + first * inner * element, inner, weight + panel * inner * PANEL * element, inner,
                        bias + 4 * panel * PANEL if bias else 0, kind, paired,
                    )  # fmt: skip

    return matmul
