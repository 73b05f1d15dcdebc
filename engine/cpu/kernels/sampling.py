"""One token per row of logits: the most likely, or one drawn by inverting the cumulative distribution."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np

from engine.cpu.kernels.compiled import inlined_with_constants, kernel
from engine.cpu.kernels.emit import F32
from engine.cpu.kernels.simd import address_of, exp, largest, load, load_double, load_int, store, store_int, take_ticket

ONE, ZERO, LEAST, LOWEST = np.float32(1), np.float32(0), np.float32(-87), np.float32(-3e38)
CHUNK = 1024
"""Weights are summed in float32 in chunks of this many, and the chunks' sums in float64."""


@inlined_with_constants
def _highest(logits: int, start: int, columns: int, kind: int) -> Any:
    """The highest of so many logits from `start` on."""
    highest = load(logits, start, kind)
    if kind == F32:
        highest = largest(logits, start, start + columns)
    else:
        for i in range(start + 1, start + columns):
            highest = max(highest, load(logits, i, kind))
    return highest


@inlined_with_constants
def _weight_of(logits: int, begin: int, end: int, highest: Any, scale: Any, kind: int) -> Any:
    """The sum of e^((x - highest) * scale) over the logits of a chunk."""
    part: Any = ZERO
    for i in range(begin, end):
        x = (load(logits, i, kind) - highest) * scale
        part += exp(x) if x > LEAST else ZERO
    return part


@inlined_with_constants
def _weight_of_row(logits: int, start: int, columns: int, highest: Any, scale: Any, kind: int) -> Any:
    """The same over a row, in float64."""
    total: Any = 0.0
    for begin in range(start, start + columns, CHUNK):
        total += _weight_of(logits, begin, min(begin + CHUNK, start + columns), highest, scale, kind)
    return total


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
            highest = _highest(logits, start, columns, kind)
            temperature = load(temperatures, row, F32)
            if temperature == ZERO or highest < LOWEST:  # no token is allowed: the request must end, with any token
                best = 0
                while best < columns - 1 and load(logits, start + best, kind) != highest:
                    best += 1
                store_int(out, row, best)
                continue
            scale = ONE / temperature
            total = _weight_of_row(logits, start, columns, highest, scale, kind)
            target = load_double(uniforms, row) * total
            chosen, begin = start, start
            reached: Any = 0.0
            while begin < start + columns:  # the chunk in which the target lies, or the last that has any weight
                part = _weight_of(logits, begin, min(begin + CHUNK, start + columns), highest, scale, kind)
                if part > ZERO:
                    chosen = begin
                    if reached + part >= target:
                        break
                reached += part
                begin += CHUNK
            begin, chosen = chosen, -1
            nearest, heaviest = LEAST, 0
            for i in range(begin, min(begin + CHUNK, start + columns)):
                x = (load(logits, i, kind) - highest) * scale
                if x > LEAST:
                    if x > nearest:
                        nearest, heaviest = x, i - start
                    reached += exp(x)
                    if reached >= target:
                        chosen = i - start
                        break
            if chosen < 0:  # the chunk's sum was rounded up
                chosen = heaviest
            store_int(out, row, min(max(chosen, 0), columns - 1))  # whatever the logits were

    return choose


@cache
def score_kernel(kind: int) -> Any:
    """How likely one token of each row is. Arguments: rows, columns; logits, row stride; rows' numbers in the logits [rows] int64;
    temperatures [rows] float32, over 0; tokens [rows] int64; bests [rows] float32: the highest logits; totals [rows] float32: the
    sums of e^((x - best) / temperature) over the rows; ranks [rows] int64: how many tokens are likelier, and one.
    """

    @kernel
    def score(data: Any) -> None:
        a = address_of(data)
        rows, columns, logits, stride = load_int(a, 2), load_int(a, 3), load_int(a, 4), load_int(a, 5)
        numbers, temperatures, tokens = load_int(a, 6), load_int(a, 7), load_int(a, 8)
        bests, totals, ranks = load_int(a, 9), load_int(a, 10), load_int(a, 11)
        while True:
            row = take_ticket(a)
            if row >= rows:
                return
            start = load_int(numbers, row) * stride
            highest = _highest(logits, start, columns, kind)
            own = load(logits, start + load_int(tokens, row), kind)
            scale = ONE / load(temperatures, row, F32)
            total: Any = 0.0
            likelier = 0
            for begin in range(start, start + columns, CHUNK):
                part, count = ZERO, ZERO
                for i in range(begin, min(begin + CHUNK, start + columns)):
                    given = load(logits, i, kind)
                    x = (given - highest) * scale
                    part += exp(x) if x > LEAST else ZERO
                    count += ONE if given > own else ZERO
                total += part
                likelier += int(count)
            store(bests, row, F32, highest)
            store(totals, row, F32, np.float32(total))
            store_int(ranks, row, likelier + 1)

    return score


FAR = np.float32(32)
HALVINGS = 24


@cache
def select_kernel(kind: int) -> Any:
    """The tokens from the best down to the `wanted`th and some more, in the order of their ids.

    Arguments: rows, columns; logits, row stride; temperatures [rows] float32, over 0; wanted, room; values [rows, room]
    float32; ids [rows, room] int64; counts [rows] int64, -1 where equals do not fit or no token is allowed; totals [rows] float32: the sum of
    e^((x - best) / temperature) over the row. What is under e^-32 of the best is left out.

    How far down to go is found by halving: counting vectors of tokens over a border takes less than sorting any of
    them.
    """

    @kernel
    def select(data: Any) -> None:
        a = address_of(data)
        rows, columns, logits, stride = load_int(a, 2), load_int(a, 3), load_int(a, 4), load_int(a, 5)
        temperatures, wanted, room, values, ids = (
            load_int(a, 6), load_int(a, 7), load_int(a, 8), load_int(a, 9), load_int(a, 10),
        )  # fmt: skip
        counts, totals = load_int(a, 11), load_int(a, 12)
        while True:
            row = take_ticket(a)
            if row >= rows:
                return
            start = row * stride
            highest = _highest(logits, start, columns, kind)
            if highest < LOWEST:
                store_int(counts, row, -1)
                continue
            temperature = load(temperatures, row, F32)
            scale = ONE / temperature
            total = _weight_of_row(logits, start, columns, highest, scale, kind)
            store(totals, row, F32, np.float32(total))
            low, high, count = ZERO, FAR * temperature, 0
            border = high
            for turn in range(HALVINGS):
                border = high if turn == 0 else (low + high) * np.float32(0.5)
                count = 0
                for begin in range(start, start + columns, CHUNK):
                    part = ZERO
                    for i in range(begin, min(begin + CHUNK, start + columns)):
                        part += ONE if highest - load(logits, i, kind) <= border else ZERO
                    count += int(part)
                if count > room:
                    high = border
                elif count >= wanted or turn == 0:
                    break
                else:
                    low = border
            if count > room or (count < wanted and border != FAR * temperature):
                store_int(counts, row, -1)
                continue
            place = row * room
            for i in range(start, start + columns):
                # What compares as it likes, NaN, may be counted otherwise than it is stored: there is no more room than there is.
                if place < (row + 1) * room and highest - load(logits, i, kind) <= border:
                    store(values, place, F32, load(logits, i, kind))
                    store_int(ids, place, i - start)
                    place += 1
            store_int(counts, row, place - row * room)

    return select
