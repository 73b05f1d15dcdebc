"""What adapters add to a layer's products: x A^T B^T for runs of rows, each run with an adapter of its own."""

from __future__ import annotations

from functools import cache
from typing import Any

from engine.kernels.compiled import kernel
from engine.kernels.emit import F32
from engine.kernels.simd import address_of, load_int, take_ticket
from engine.kernels.tiles import ADD, MAX_ROWS, PANEL, STORE, product

FIELDS = 6
"""A run: first row, rows, packed A, inner of A's product (the layer's inputs), packed B, rank."""


@cache
def shrink_kernel(kind: int, paired: int) -> Any:
    """Low = x A^T. Arguments: runs, their number, panels of the widest A; x, its stride; low [rows, *], its stride.

    A is packed as [panels, inputs, 32]; a run with rank r has ceil(r / 32) panels.
    """
    element = 4 if kind == F32 else 2

    @kernel
    def shrink(data: Any) -> None:
        a = address_of(data)
        runs, count, panels = load_int(a, 2), load_int(a, 3), load_int(a, 4)
        x, x_stride, low, low_stride = load_int(a, 5), load_int(a, 6), load_int(a, 7), load_int(a, 8)
        while True:
            ticket = take_ticket(a)
            if ticket >= count * panels:
                return
            run, panel = runs + 8 * FIELDS * (ticket // panels), ticket % panels
            begin, rows, weight, inner, rank = (
                load_int(run, 0), load_int(run, 1), load_int(run, 2), load_int(run, 3), load_int(run, 5),
            )  # fmt: skip
            if panel * PANEL >= rank:
                continue
            for first in range(begin, begin + rows, MAX_ROWS):
                product(
                    min(MAX_ROWS, begin + rows - first), low + (first * low_stride + panel * PANEL) * element, low_stride,
                    x + first * x_stride * element, x_stride, weight + panel * inner * PANEL * element, inner, 0, 0, 0, 0,
                    kind, paired, STORE,
                )  # fmt: skip

    return shrink


@cache
def expand_kernel(kind: int, paired: int) -> Any:
    """Delta += low B^T. Arguments: runs, their number, panels of the layer; low, its stride; delta [rows, panels * 32]
    float32, its stride. B is packed as [panels, rank, 32].
    """
    element = 4 if kind == F32 else 2

    @kernel
    def expand(data: Any) -> None:
        a = address_of(data)
        runs, count, panels = load_int(a, 2), load_int(a, 3), load_int(a, 4)
        low, low_stride, delta, delta_stride = load_int(a, 5), load_int(a, 6), load_int(a, 7), load_int(a, 8)
        while True:
            ticket = take_ticket(a)
            if ticket >= count * panels:
                return
            run, panel = runs + 8 * FIELDS * (ticket // panels), ticket % panels
            begin, rows, weight, rank = load_int(run, 0), load_int(run, 1), load_int(run, 4), load_int(run, 5)
            for first in range(begin, begin + rows, MAX_ROWS):
                product(
                    min(MAX_ROWS, begin + rows - first), delta + 4 * (first * delta_stride + panel * PANEL), delta_stride,
                    low + first * low_stride * element, low_stride, weight + panel * rank * PANEL * element, rank, 0, 0, 0, 0,
                    kind, paired, ADD,
                )  # fmt: skip

    return expand
