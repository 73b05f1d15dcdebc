"""The softmax of one row of scores, as a Numba intrinsic, for CPUs with AVX-512.

The weights are those of values in bfloat16, so two to the power of x needs to be exact to that only. Sums run over the same vectors of
16 keys wherever a row begins in its tile, so that they have one order.
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
    exponential,
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


def _power_of_two(builder: Any, x: Any) -> Any:
    """2 to the x for a vector of 16: 0 far below zero. Within 3e-6, which is far less than bfloat16 keeps.

    The Taylor polynomial of 2^f for the fraction |f| <= 0.5, put into its place by the instruction for that.
    """
    nearest = cgutils.get_or_insert_function(builder.module, ir.FunctionType(VECTOR, [VECTOR]), "llvm.roundeven.v16f32")
    scaled = cgutils.get_or_insert_function(
        builder.module,
        ir.FunctionType(VECTOR, [VECTOR, VECTOR, VECTOR, ir.IntType(16), I32]),
        "llvm.x86.avx512.mask.scalef.ps.512",
    )
    whole = builder.call(nearest, [x])
    fraction = builder.fsub(x, whole)
    power = ir.Constant(VECTOR, [math.log(2) ** 5 / 120] * LANES)
    for degree in (4, 3, 2, 1, 0):
        coefficient = ir.Constant(VECTOR, [math.log(2) ** degree / math.factorial(degree)] * LANES)
        power = multiply_add(builder, power, fraction, coefficient)
    every, current_rounding = ir.Constant(ir.IntType(16), -1), I32(4)
    return builder.call(scaled, [power, whole, power, every, current_rounding])


@intrinsic(prefer_literal=True)
def softmax_row(
    typing_context: Any, scores: Any, weights: Any, begin: Any, end: Any, limit: Any, scale: Any, sink: Any, kind: Any
) -> Any:
    """weights[i] = e^(scores[i] * scale - greatest) for begin <= i < end, else 0, up to `limit`; returns the sum of the weights,
    not yet rounded, and of the sink's e^(sink - greatest).

    The weights are of `kind`, BF16 or F32; then they may take the place of the scores. The scale is positive. `limit` is a multiple of 16, and scores may be read up to it.
    """
    number = kind.literal_value

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        scores, weights, begin, end, limit, scale, sink, _ = args
        zero, lowest = (ir.Constant(VECTOR, [value] * LANES) for value in (0.0, -1e30))
        words = ir.VectorType(I32, LANES)
        first, last = builder.udiv(begin, I64(LANES)), builder.udiv(builder.sub(end, I64(1)), I64(LANES))

        def all_of(value: Any) -> Any:
            one = builder.insert_element(ir.Constant(words, ir.Undefined), builder.trunc(value, I32), I32(0))
            return builder.shuffle_vector(one, one, ir.Constant(words, [0] * LANES))

        def inside(vector: Any, value: Any, other: Any) -> Any:
            """The lanes of a vector that are within the bounds, `other` elsewhere."""
            start = builder.mul(vector, I64(LANES))
            lanes = builder.add(all_of(start), ir.Constant(words, list(range(LANES))))
            keep = builder.and_(
                builder.icmp_signed(">=", lanes, all_of(begin)), builder.icmp_signed("<", lanes, all_of(end))
            )
            return builder.select(keep, value, other)

        def score(vector: Any) -> Any:
            return load_vector(builder, scores, builder.mul(vector, I64(LANES)), F32)

        def between(change: Callable[[Any], None]) -> None:
            """Every vector that is whole within the bounds."""
            with cgutils.for_range_slice(builder, builder.add(first, I64(1)), last, I64(1), I64) as (vector, _):
                change(vector)

        best = cgutils.alloca_once_value(builder, inside(first, score(first), lowest))

        def compare(value: Any) -> None:
            held = builder.load(best)
            builder.store(builder.select(builder.fcmp_ordered(">", value, held), value, held), best)

        between(lambda vector: compare(score(vector)))
        compare(inside(last, score(last), lowest))
        greatest = builder.fmul(greatest_of(builder, builder.load(best)), scale)
        greatest = builder.select(builder.fcmp_ordered(">", sink, greatest), sink, greatest)
        to_two = FLOAT(1 / math.log(2))
        factor = broadcast(builder, builder.fmul(scale, to_two))
        below = broadcast(builder, builder.fneg(builder.fmul(greatest, to_two)))

        def weight_of(vector: Any) -> Any:
            return _power_of_two(builder, multiply_add(builder, score(vector), factor, below))

        def put(vector: Any, weight: Any) -> None:
            store_vector(builder, weight, weights, builder.mul(vector, I64(LANES)), number)

        def clear(start: Any, stop: Any) -> None:
            with cgutils.for_range_slice(builder, start, stop, I64(1), I64) as (vector, _):
                put(vector, zero)

        clear(I64(0), first)
        total = cgutils.alloca_once_value(builder, zero)

        def weigh(vector: Any, weight: Any) -> None:
            builder.store(builder.fadd(builder.load(total), weight), total)
            put(vector, weight)

        weigh(first, inside(first, weight_of(first), zero))
        between(lambda vector: weigh(vector, weight_of(vector)))
        with builder.if_then(builder.icmp_signed("!=", first, last)):
            weigh(last, inside(last, weight_of(last), zero))
        clear(builder.add(last, I64(1)), builder.udiv(limit, I64(LANES)))
        has_sink = builder.fcmp_ordered(">", sink, FLOAT(-1e30))
        own = builder.select(has_sink, exponential(builder, builder.fsub(sink, greatest)), FLOAT(0.0))
        return builder.fadd(total_of(builder, builder.load(total)), own)

    return types.float32(*(types.int64,) * 5, types.float32, types.float32, kind), emit


def _power_by_floor(builder: Any, x: Any) -> Any:
    """The same in fewer instructions on Intel's CPUs, for which the fraction is 0 <= f < 1. 2^0 is 1 to the bit.

    The polynomial of degree 4 whose greatest relative error is least, among those that are 1 at 0.
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
    signature = ir.FunctionType(VECTOR, [VECTOR, VECTOR])
    return builder.call(cgutils.get_or_insert_function(builder.module, signature, "llvm.maxnum.v16f32"), [one, other])


class _Row:
    """One row of a span: its scores, and the bounds of those that it sees, counted from the span's begin.

    bounds: int64 [rows, 2], in the sequence. The row sees nothing of the span if its begin is not below its end.
    """

    def __init__(self, builder: Any, row: Any, scores: Any, stride: Any, bounds: Any, base: Any) -> None:
        self._builder = builder
        self._scores = builder.add(scores, builder.mul(builder.mul(row, stride), I64(4)))
        begin, end = (
            builder.sub(
                builder.load(pointer_at(builder, bounds, builder.add(builder.mul(row, I64(2)), I64(n)), I64)), base
            )
            for n in range(2)
        )
        self.begin = builder.select(builder.icmp_signed(">", begin, I64(0)), begin, I64(0))
        self.end = builder.select(builder.icmp_signed("<", end, I64(SPAN)), end, I64(SPAN))

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
    typing_context: Any, found: Any, rows: Any, scores: Any, stride: Any, bounds: Any, base: Any, scale: Any
) -> Any:
    """found[r] = the greatest scaled score that row r sees of a span that begins at position `base`; -1e30 if it sees none.

    scores: float32 from the span's begin on, rows `stride` apart. bounds: int64 [rows, 2], the first position that a row sees and the
    one after the last. The scale is positive.
    """

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        found, rows, scores, stride, bounds, base, scale = args
        lowest = ir.Constant(VECTOR, [-1e30] * LANES)
        best = cgutils.alloca_once(builder, VECTOR)

        def put(row: Any, greatest: Any) -> None:
            value = builder.fmul(greatest_of(builder, greatest), scale)
            builder.store(value, pointer_at(builder, found, row, FLOAT))

        with cgutils.for_range(builder, rows) as loop:
            row = _Row(builder, loop.index, scores, stride, bounds, base)
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

    return types.void(*(types.int64,) * 6, types.float32), emit


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
    rows: Any, scores: Any, stride: Any, bounds: Any, base: Any, first: Any, limit: Any, scale: Any,
) -> Any:  # fmt: skip
    """weights[r, i] = e^(scores[r, i] * scale - greatest[r]) in bfloat16 where row r sees the key, else 0, for first <= i < limit, both
    multiples of 16. totals[r] = totals[r] * factors[r] + the sum of its weights, not yet rounded.

    Rows of weights are `weights_stride` apart; the other arguments are those of `span_greatest`.
    """

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        (weights, weights_stride, totals, factors, greatest,
         rows, scores, stride, bounds, base, first, limit, scale) = args  # fmt: skip
        zero = ir.Constant(VECTOR, [0.0] * LANES)
        to_two = FLOAT(1 / math.log(2))
        times = broadcast(builder, builder.fmul(scale, to_two))
        sums = cgutils.alloca_once(builder, VECTOR)

        with cgutils.for_range(builder, rows) as loop:
            row = _Row(builder, loop.index, scores, stride, bounds, base)
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

    return types.void(*(types.int64,) * 12, types.float32), emit
