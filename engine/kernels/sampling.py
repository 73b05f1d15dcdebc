"""One token per row of logits: the most likely, or one drawn by inverting the cumulative distribution."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np

from engine.kernels.compiled import kernel
from engine.kernels.emit import F32
from engine.kernels.simd import address_of, exp, load, load_double, load_int, store_int, take_ticket

ONE, ZERO, LEAST, LOWEST = np.float32(1), np.float32(0), np.float32(-87), np.float32(-3e38)
CHUNK = 1024
"""Weights are summed by so many in float32, and the sums in float64."""


@cache
def choose_kernel(kind: int) -> Any:
    """Arguments: rows, columns; logits, row stride; temperatures [rows] float32 (0: the most likely); uniform numbers
    [rows] float64 in (0, 1); out [rows] int64.

    Of equals the first is the most likely. A token under e^-87 of the best is never drawn.
    """

    @kernel
    def choose(data: Any) -> None:
        a = address_of(data)
        rows, columns, logits, stride = load_int(a, 2), load_int(a, 3), load_int(a, 4), load_int(a, 5)
        temperatures, uniforms, out = load_int(a, 6), load_int(a, 7), load_int(a, 8)
        while True:
            row = take_ticket(a)
            if row >= rows:
                return
            start = row * stride
            most = load(logits, start, kind)
            for i in range(start + 1, start + columns):
                most = max(most, load(logits, i, kind))
            temperature = load(temperatures, row, F32)
            if temperature == ZERO or most < LOWEST:  # nothing is allowed: any token will do, its request must end
                best = 0
                while best < columns - 1 and load(logits, start + best, kind) != most:
                    best += 1
                store_int(out, row, best)
                continue
            scale = ONE / temperature
            total: Any = 0.0
            for begin in range(start, start + columns, CHUNK):
                part: Any = ZERO
                for i in range(begin, min(begin + CHUNK, start + columns)):
                    x = (load(logits, i, kind) - most) * scale
                    part += exp(x) if x > LEAST else ZERO
                total += part
            target = load_double(uniforms, row) * total
            chosen, begin = start, start
            reached: Any = 0.0
            while begin < start + columns:  # the chunk in which the target lies, or the last that has any weight
                part = ZERO
                for i in range(begin, min(begin + CHUNK, start + columns)):
                    x = (load(logits, i, kind) - most) * scale
                    part += exp(x) if x > LEAST else ZERO
                if part > ZERO:
                    chosen = begin
                    if reached + part >= target:
                        break
                reached += part
                begin += CHUNK
            begin, chosen = chosen, 0
            for i in range(begin, min(begin + CHUNK, start + columns)):
                x = (load(logits, i, kind) - most) * scale
                if x > LEAST:
                    chosen = i - start
                    reached += exp(x)
                    if reached >= target:
                        break
            store_int(out, row, min(max(chosen, 0), columns - 1))  # whatever the logits were

    return choose
