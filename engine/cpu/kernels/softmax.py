"""The softmax of one row of scores, as a Numba intrinsic.

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
    F32,
    FLOAT,
    I32,
    I64,
    LANES,
    VECTOR,
    WORDS,
    broadcast,
    exponential,
    greatest_of,
    has_avx512,
    load_vector,
    multiply_add,
    store_vector,
    total_of,
)


def _power_of_two(builder: Any, x: Any) -> Any:
    """2 to the x for a vector of 16: 0 far below zero. Within 3e-6, which is far less than bfloat16 keeps.

    The Taylor polynomial of 2^f for the fraction |f| <= 0.5, put into its place by AVX-512's instruction for that, or by the
    exponent's bits, where all below 2^-126 is 0.
    """
    nearest = cgutils.get_or_insert_function(builder.module, ir.FunctionType(VECTOR, [VECTOR]), "llvm.roundeven.v16f32")
    whole = builder.call(nearest, [x])
    fraction = builder.fsub(x, whole)
    power = ir.Constant(VECTOR, [math.log(2) ** 5 / 120] * LANES)
    for degree in (4, 3, 2, 1, 0):
        coefficient = ir.Constant(VECTOR, [math.log(2) ** degree / math.factorial(degree)] * LANES)
        power = multiply_add(builder, power, fraction, coefficient)
    if not has_avx512():
        exponent = builder.add(builder.fptosi(whole, WORDS), ir.Constant(WORDS, [127] * LANES))
        factor = builder.bitcast(builder.shl(exponent, ir.Constant(WORDS, [23] * LANES)), VECTOR)
        least, zero = (ir.Constant(VECTOR, [value] * LANES) for value in (-126.0, 0.0))
        return builder.select(builder.fcmp_ordered("<", whole, least), zero, builder.fmul(power, factor))
    scaled = cgutils.get_or_insert_function(
        builder.module,
        ir.FunctionType(VECTOR, [VECTOR, VECTOR, VECTOR, ir.IntType(16), I32]),
        "llvm.x86.avx512.mask.scalef.ps.512",
    )
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
        first, last = builder.udiv(begin, I64(LANES)), builder.udiv(builder.sub(end, I64(1)), I64(LANES))

        def all_of(value: Any) -> Any:
            one = builder.insert_element(ir.Constant(WORDS, ir.Undefined), builder.trunc(value, I32), I32(0))
            return builder.shuffle_vector(one, one, ir.Constant(WORDS, [0] * LANES))

        def inside(vector: Any, value: Any, other: Any) -> Any:
            """The lanes of a vector that are within the bounds, `other` elsewhere."""
            start = builder.mul(vector, I64(LANES))
            lanes = builder.add(all_of(start), ir.Constant(WORDS, list(range(LANES))))
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
