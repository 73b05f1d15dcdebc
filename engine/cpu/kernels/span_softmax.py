"""The softmax of rows of scores made span by span, as Numba intrinsics, for CPUs with AVX-512 and tiles.

A span's greatest scores, the weights that its scores become, and the factors that bring what was added up before to a new greatest score. A
row that sees the whole longest span holds it in registers. Sums run over the same vectors of 16 keys whatever the other rows are.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from engine.cpu.kernels.emit import (
    BF16,
    F32,
    FLOAT,
    I32,
    I64,
    LANES,
    VECTOR,
    broadcast,
    greatest_of,
    load_vector,
    multiply_add,
    pointer_at,
    store_both,
    store_vector,
    total_of,
)

SPAN = 256
"""The most keys of a span, for which a row's scores are held in 16 registers."""


def _power_by_floor(builder: Any, x: Any) -> Any:
    """2 to the x for a vector of 16: 0 far below zero, 1 to the bit for 0. Within 3e-6, which is far less than bfloat16 keeps.

    The polynomial of degree 4 in the fraction, 0 <= f < 1, whose greatest relative error is least among those that are 1 at 0. On
    an Intel Xeon with AMX it takes two thirds of the time of `softmax`'s, with which AMD's CPUs were measured.
    """
    every, current_rounding, downwards = ir.Constant(ir.IntType(16), -1), I32(4), I32(9)
    arguments = [VECTOR, I32, VECTOR, ir.IntType(16), I32]
    reduce = cgutils.get_or_insert_function(
        builder.module, ir.FunctionType(VECTOR, arguments), "llvm.x86.avx512.mask.reduce.ps.512"
    )
    scaled = cgutils.get_or_insert_function(
        builder.module,
        ir.FunctionType(VECTOR, [VECTOR, VECTOR, VECTOR, ir.IntType(16), I32]),
        "llvm.x86.avx512.mask.scalef.ps.512",
    )
    fraction = builder.call(reduce, [x, downwards, x, every, current_rounding])
    power = ir.Constant(VECTOR, [0.01342671] * LANES)
    for coefficient in (0.05224244, 0.24128022, 0.69304484, 1.0):
        power = multiply_add(builder, power, fraction, ir.Constant(VECTOR, [coefficient] * LANES))
    return builder.call(scaled, [power, x, power, every, current_rounding])


def _highest(builder: Any, one: Any, other: Any) -> Any:
    return builder.select(builder.fcmp_ordered(">", one, other), one, other)


class _Row:
    """One row of a span: its scores, and the bounds of those that it sees, counted from the span's begin.

    bounds: int64 [rows, 2], in the sequence. The row sees nothing of the span, which has `lanes` keys, if its begin is not below its end.
    """

    def __init__(self, builder: Any, row: Any, scores: Any, stride: Any, bounds: Any, base: Any, lanes: Any) -> None:
        self._builder = builder
        self._scores = builder.add(scores, builder.mul(builder.mul(row, stride), I64(4)))
        begin, end = (
            builder.sub(
                builder.load(pointer_at(builder, bounds, builder.add(builder.mul(row, I64(2)), I64(n)), I64)), base
            )
            for n in range(2)
        )
        self.begin = builder.select(builder.icmp_signed(">", begin, I64(0)), begin, I64(0))
        self.end = builder.select(builder.icmp_signed("<", end, lanes), end, lanes)

    def score(self, vector: Any) -> Any:
        """16 scores."""
        return load_vector(self._builder, self._scores, self._builder.mul(vector, I64(LANES)), F32)

    def sees_all(self) -> Any:
        """Whether it sees all keys of the longest span."""
        return self._builder.icmp_signed("==", self._builder.sub(self.end, self.begin), I64(SPAN))

    def touched(self) -> tuple[Any, Any]:
        """The first vector of which it sees something, and the one after the last."""
        builder = self._builder
        some = builder.icmp_signed("<", self.begin, self.end)
        start = builder.udiv(self.begin, I64(LANES))
        stop = builder.udiv(builder.add(self.end, I64(LANES - 1)), I64(LANES))
        return start, builder.select(some, stop, start)

    def each(self, change: Callable[[Any, Callable[[Any, Any], Any]], None]) -> None:
        """`change` for each vector that it touches, with what keeps the lanes that it sees and puts another value elsewhere."""
        builder = self._builder
        start, stop = self.touched()
        whole_start = builder.udiv(builder.add(self.begin, I64(LANES - 1)), I64(LANES))
        whole_stop = builder.udiv(self.end, I64(LANES))
        with cgutils.for_range_slice(builder, start, stop, I64(1), I64) as (vector, _):
            inside = builder.and_(
                builder.icmp_signed(">=", vector, whole_start), builder.icmp_signed("<", vector, whole_stop)
            )
            with builder.if_else(inside) as (whole, edge):
                with whole:
                    change(vector, lambda value, other: value)
                with edge:
                    change(vector, lambda value, other: self.seen(vector, value, other))

    def seen(self, vector: Any, value: Any, other: Any) -> Any:
        """The lanes of a vector that it sees, `other` elsewhere."""
        builder, words = self._builder, ir.VectorType(I32, LANES)

        def all_of(number: Any) -> Any:
            one = builder.insert_element(ir.Constant(words, ir.Undefined), builder.trunc(number, I32), I32(0))
            return builder.shuffle_vector(one, one, ir.Constant(words, [0] * LANES))

        lanes, at = ir.Constant(words, list(range(LANES))), builder.mul(vector, I64(LANES))
        low, high = (all_of(builder.sub(bound, at)) for bound in (self.begin, self.end))
        keep = builder.and_(builder.icmp_signed(">=", lanes, low), builder.icmp_signed("<", lanes, high))
        return builder.select(keep, value, other)


@intrinsic
def span_greatest(
    typing_context: Any, found: Any, rows: Any, scores: Any, stride: Any, bounds: Any, base: Any, lanes: Any, scale: Any
) -> Any:
    """found[r] = the greatest scaled score that row r sees of a span of `lanes` keys that begins at position `base`; -1e30 if it sees none.

    scores: float32 from the span's begin on, rows `stride` apart. bounds: int64 [rows, 2], the first position that a row sees and the
    one after the last. The scale is positive.
    """

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        found, rows, scores, stride, bounds, base, lanes, scale = args
        lowest = ir.Constant(VECTOR, [-1e30] * LANES)
        best = cgutils.alloca_once(builder, VECTOR)

        def put(row: Any, greatest: Any) -> None:
            value = builder.fmul(greatest_of(builder, greatest), scale)
            builder.store(value, pointer_at(builder, found, row, FLOAT))

        with cgutils.for_range(builder, rows) as loop:
            row = _Row(builder, loop.index, scores, stride, bounds, base, lanes)
            with builder.if_else(row.sees_all()) as (every, fewer):
                with every:
                    values = [row.score(I64(i)) for i in range(SPAN // LANES)]
                    while len(values) > 1:
                        values = [_highest(builder, *pair) for pair in zip(values[::2], values[1::2], strict=True)]
                    put(loop.index, values[0])
                with fewer:
                    start, stop = row.touched()
                    builder.store(lowest, best)

                    def compare(vector: Any, seen: Callable[[Any, Any], Any], row: _Row = row) -> None:
                        value = seen(row.score(vector), lowest)
                        builder.store(_highest(builder, builder.load(best), value), best)

                    row.each(compare)
                    with builder.if_else(builder.icmp_signed("<", start, stop)) as (some, none):
                        with some:
                            put(loop.index, builder.load(best))
                        with none:
                            builder.store(FLOAT(-1e30), pointer_at(builder, found, loop.index, FLOAT))
        return context.get_dummy_value()

    return types.void(*(types.int64,) * 7, types.float32), emit


@intrinsic
def raise_greatest(typing_context: Any, greatest: Any, found: Any, factors: Any, vectors: Any) -> Any:
    """Make greatest = max(greatest, found) and factors = e^(the one before - this one) for `vectors` times 16 rows in float32; returns how many
    factors are not 1.
    """

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        greatest, found, factors, vectors = args
        count = cgutils.alloca_once(builder, I64)
        builder.store(I64(0), count)
        bits = ir.IntType(LANES)
        population = cgutils.get_or_insert_function(builder.module, ir.FunctionType(bits, [bits]), "llvm.ctpop.i16")
        with cgutils.for_range(builder, vectors) as loop:
            index = builder.mul(loop.index, I64(LANES))
            before = load_vector(builder, greatest, index, F32)
            now = _highest(builder, before, load_vector(builder, found, index, F32))
            store_vector(builder, now, greatest, index, F32)
            to_two = ir.Constant(VECTOR, [1 / math.log(2)] * LANES)
            factor = _power_by_floor(builder, builder.fmul(builder.fsub(before, now), to_two))
            store_vector(builder, factor, factors, index, F32)
            changed = builder.bitcast(builder.fcmp_unordered("!=", factor, ir.Constant(VECTOR, [1.0] * LANES)), bits)
            more = builder.zext(builder.call(population, [changed]), I64)
            builder.store(builder.add(builder.load(count), more), count)
        return builder.load(count)

    return types.int64(*(types.int64,) * 4), emit


@intrinsic
def span_weights(
    typing_context: Any,
    weights: Any, weights_stride: Any, totals: Any, factors: Any, greatest: Any,
    rows: Any, scores: Any, stride: Any, bounds: Any, base: Any, lanes: Any, first: Any, limit: Any, scale: Any,
) -> Any:  # fmt: skip
    """weights[r, i] = e^(scores[r, i] * scale - greatest[r]) in bfloat16 where row r sees the key, else 0, for first <= i < limit, both
    multiples of 16. totals[r] = totals[r] * factors[r] + the sum of its weights, not yet rounded.

    Rows of weights are `weights_stride` apart; the other arguments are those of `span_greatest`.
    """

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        (weights, weights_stride, totals, factors, greatest,
         rows, scores, stride, bounds, base, lanes, first, limit, scale) = args  # fmt: skip
        zero = ir.Constant(VECTOR, [0.0] * LANES)
        to_two = FLOAT(1 / math.log(2))
        times = broadcast(builder, builder.fmul(scale, to_two))
        sums = cgutils.alloca_once(builder, VECTOR)

        with cgutils.for_range(builder, rows) as loop:
            row = _Row(builder, loop.index, scores, stride, bounds, base, lanes)
            own = builder.add(weights, builder.mul(builder.mul(loop.index, weights_stride), I64(2)))

            def held(address: Any, number: Any = loop.index) -> Any:
                return pointer_at(builder, address, number, FLOAT)

            plus = broadcast(builder, builder.fneg(builder.fmul(builder.load(held(greatest)), to_two)))

            def weight_of(vector: Any, row: _Row = row, plus: Any = plus) -> Any:
                return _power_by_floor(builder, multiply_add(builder, row.score(vector), times, plus))

            def clear(start: Any, stop: Any, own: Any = own) -> None:
                with cgutils.for_range_slice(builder, start, stop, I64(1), I64) as (vector, _):
                    store_vector(builder, zero, own, builder.mul(vector, I64(LANES)), BF16)

            with builder.if_else(row.sees_all()) as (every, fewer):
                with every:
                    parts = [zero] * 4
                    for i in range(0, SPAN // LANES, 2):
                        both = [weight_of(I64(i)), weight_of(I64(i + 1))]
                        for number, weight in enumerate(both):
                            parts[(i + number) % 4] = builder.fadd(parts[(i + number) % 4], weight)
                        store_both(builder, both, own, I64(LANES * i))
                    halves = [builder.fadd(parts[0], parts[1]), builder.fadd(parts[2], parts[3])]
                    builder.store(builder.fadd(*halves), sums)
                with fewer:
                    start, stop = row.touched()
                    builder.store(zero, sums)
                    clear(builder.udiv(first, I64(LANES)), start)

                    def weigh(
                        vector: Any, seen: Callable[[Any, Any], Any], own: Any = own, of: Any = weight_of
                    ) -> None:
                        weight = seen(of(vector), zero)
                        builder.store(builder.fadd(builder.load(sums), weight), sums)
                        store_vector(builder, weight, own, builder.mul(vector, I64(LANES)), BF16)

                    row.each(weigh)
                    after = builder.select(builder.icmp_signed("<", start, stop), stop, builder.udiv(first, I64(LANES)))
                    clear(after, builder.udiv(limit, I64(LANES)))
            scaled = builder.fmul(builder.load(held(totals)), builder.load(held(factors)))
            builder.store(builder.fadd(scaled, total_of(builder, builder.load(sums))), held(totals))
        return context.get_dummy_value()

    return types.void(*(types.int64,) * 13, types.float32), emit
