"""The first half of what adapters add to a layer's products: x A^T, for runs of rows with an adapter of their own each.

The second half, times B^T, is where the layer's own product begins (engine/kernels/matmul.py).
"""

from __future__ import annotations

from functools import cache
from typing import Any

from engine.kernels.compiled import kernel
from engine.kernels.emit import F32
from engine.kernels.simd import address_of, load_int, take_ticket
from engine.kernels.tiles import MAX_ROWS, PANEL, STORE, product

FIELDS = 6
"""A run: first row, rows, packed A, packed B, rank (0: no adapter), start of the sums (float32 [width]; 0: at zero)."""


@cache
def shrink_kernel(kind: int, paired: int) -> Any:
    """Low = x A^T. Arguments: runs, their number, panels of the widest A; x, its stride, inputs; low, its stride.

    A is packed as [panels, inputs, 32]; a run with rank r has ceil(r / 32) panels.
    """
    element = 4 if kind == F32 else 2

    @kernel
    def shrink(data: Any) -> None:
        a = address_of(data)
        runs, count, panels = load_int(a, 2), load_int(a, 3), load_int(a, 4)
        x, x_stride, inner, low, low_stride = (
            load_int(a, 5), load_int(a, 6), load_int(a, 7), load_int(a, 8), load_int(a, 9),
        )  # fmt: skip
        while True:
            ticket = take_ticket(a)
            if ticket >= count * panels:
                return
            run, panel = runs + 8 * FIELDS * (ticket // panels), ticket % panels
            begin, rows, weight, rank = load_int(run, 0), load_int(run, 1), load_int(run, 2), load_int(run, 4)
            if panel * PANEL >= rank:
                continue
            for first in range(begin, begin + rows, MAX_ROWS):
                product(
                    min(MAX_ROWS, begin + rows - first), low + (first * low_stride + panel * PANEL) * element, low_stride,
                    x + first * x_stride * element, x_stride, weight + panel * inner * PANEL * element, inner,
                    0, 0, 0, 0, kind, paired, STORE,
                )  # fmt: skip

    return shrink
