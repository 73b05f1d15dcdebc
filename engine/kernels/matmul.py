"""x W^T + b: weights in panels of 32 columns, each read once, straight through memory, for all rows."""

from __future__ import annotations

from functools import cache
from typing import Any

from engine.kernels.compiled import kernel
from engine.kernels.emit import F32, LANES
from engine.kernels.simd import address_of, load_int, take_ticket
from engine.kernels.tiles import ADD, GATE, MAX_ROWS, PANEL, WIDEN, product

PIECES = 16
"""A few rows take as long as reading the weight does, and memory is read fastest in long runs: so many for all."""
MOST_TILES = 4
"""With more tiles of rows it is the products that take the time, and the workers share out single panels."""


@cache
def matmul_kernel(kind: int, paired: int, ending: int) -> Any:
    """Arguments: rows, inner, panels; x [rows, inner], its stride; weight [panels, inner, 32]; start (0: none);
    out, its stride. `ending` is STORE, ADD, GATE or WIDEN.
    """
    element = 4 if kind == F32 else 2
    out_element = 4 if ending in (ADD, WIDEN) else element
    width = LANES if ending == GATE else PANEL
    pieces = PIECES

    @kernel
    def matmul(data: Any) -> None:
        a = address_of(data)
        rows, inner, panels = load_int(a, 2), load_int(a, 3), load_int(a, 4)
        x, x_stride, weight = load_int(a, 5), load_int(a, 6), load_int(a, 7)
        start, out, stride = load_int(a, 8), load_int(a, 9), load_int(a, 10)
        tiles = (rows + MAX_ROWS - 1) // MAX_ROWS
        tile = (rows + tiles - 1) // tiles
        each = max(1, panels // pieces) if tiles <= MOST_TILES else 1
        while True:
            begin = take_ticket(a) * each
            if begin >= panels:
                return
            for panel in range(begin, min(begin + each, panels)):
                for first in range(0, rows, tile):
                    product(
                        min(tile, rows - first), out + (first * stride + panel * width) * out_element, stride,
                        x + first * x_stride * element, x_stride, weight + panel * inner * PANEL * element, inner,
                        start + 4 * panel * PANEL if start else 0, 0, 0, 0, kind, paired, ending,
                    )  # fmt: skip

    return matmul
