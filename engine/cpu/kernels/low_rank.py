"""The two inner loops of adapters, as Numba intrinsics: rows times the rows of A, and what comes of it times B.

Addresses are int64, strides count elements, `kind` and `paired` are compile-time constants. Nothing here checks bounds.
Each sum has one order, whatever the tile.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from engine.cpu.kernels.emit import (
    F32,
    FLOAT,
    HELD,
    I16,
    I32,
    I64,
    LANES,
    MAX_ROWS,
    PAIRS,
    WORDS,
    add_pairs,
    add_product,
    broadcast,
    element_bytes,
    element_type,
    load_vector,
    pointer_at,
    store_element,
    store_vector,
    switch,
    total_of,
    vectors_at_once,
    widen,
    zeros,
)
from engine.cpu.kernels.tiles import PANEL

DOT_ROWS = DOT_RANKS = 4 if HELD >= 24 else 2
"""One tile of `dots`: where registers hold them 16 sums, which hide how long a multiplication takes."""


@intrinsic(prefer_literal=True)
def dots(
    typing_context: Any,
    rows: Any, ranks: Any, out: Any, out_stride: Any, x: Any, x_stride: Any, a: Any, inner: Any, kind: Any, paired: Any,
) -> Any:  # fmt: skip
    """out[r, k] = x[r] . a[k], for at most DOT_ROWS rows and DOT_RANKS ranks; all of `kind`, a [ranks, inner] without gaps."""
    number, in_pairs = kind.literal_value, bool(paired.literal_value)
    width = 2 * LANES if in_pairs else LANES

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        rows, ranks, out, out_stride, x, x_stride, a, inner, *_ = args
        whole = builder.udiv(inner, I64(width))
        rest = builder.urem(inner, I64(width))
        unit = I32 if in_pairs else element_type(number)  # what a masked load may leave out
        lanes = ir.VectorType(unit, LANES)
        mask_type = ir.VectorType(ir.IntType(1), LANES)
        masked = cgutils.get_or_insert_function(
            builder.module,
            ir.FunctionType(lanes, [ir.PointerType(lanes), I32, mask_type, lanes]),
            f"llvm.masked.load.v16{'i32' if in_pairs else {2: 'i16', 4: 'f32'}[element_bytes(number)]}.p0",
        )

        def read(address: Any, index: Any, mask: Any) -> Any:
            if mask is None and not in_pairs:
                return load_vector(builder, address, index, number)
            pointer = pointer_at(builder, address, index, I16 if in_pairs else unit, lanes)
            if mask is None:
                return builder.bitcast(builder.load(pointer, align=2), PAIRS)
            raw = builder.call(masked, [pointer, I32(element_bytes(number)), mask, ir.Constant(lanes, None)])
            return builder.bitcast(raw, PAIRS) if in_pairs else widen(builder, raw, number, LANES)

        def tile(count: int, depth: int) -> None:
            sums = zeros(builder, count * depth)

            def step(index: Any, mask: Any) -> None:
                left = [
                    read(x, builder.add(builder.mul(x_stride, I64(r)), index), mask) for r in range(count)
                ]  # fmt: skip
                right = [read(a, builder.add(builder.mul(inner, I64(k)), index), mask) for k in range(depth)]
                for r in range(count):
                    for k in range(depth):
                        if in_pairs:
                            add_pairs(builder, sums[r * depth + k], left[r], right[k])
                        else:
                            add_product(builder, sums[r * depth + k], left[r], right[k])

            with cgutils.for_range(builder, whole) as i:
                step(builder.mul(i.index, I64(width)), None)
            with builder.if_then(builder.icmp_signed("!=", rest, I64(0))):
                units = builder.trunc(builder.udiv(rest, I64(2)) if in_pairs else rest, I32)
                limit = builder.insert_element(ir.Constant(WORDS, ir.Undefined), units, I32(0))
                limit = builder.shuffle_vector(limit, limit, ir.Constant(WORDS, [0] * LANES))
                numbers = ir.Constant(WORDS, list(range(LANES)))
                step(builder.mul(whole, I64(width)), builder.icmp_unsigned("<", numbers, limit))
            for r in range(count):
                for k in range(depth):
                    index = builder.add(builder.mul(out_stride, I64(r)), I64(k))
                    store_element(builder, total_of(builder, builder.load(sums[r * depth + k])), out, index, number)

        switch(builder, rows, DOT_ROWS, lambda count: switch(builder, ranks, DOT_RANKS, lambda k: tile(count, k)))
        return context.get_dummy_value()

    return types.void(*(types.int64,) * 8, kind, paired), emit


@intrinsic(prefer_literal=True)
def expand(
    typing_context: Any,
    rows: Any, out: Any, out_stride: Any, low: Any, low_stride: Any, first: Any, second: Any, panel: Any, depth: Any,
    start: Any, kind: Any, paired: Any,
) -> Any:  # fmt: skip
    """out[r, :32] = start[:32] + sum over k of low[r, first + k] * panel[k, :16] and low[r, second + k] * panel[k, 16:32],
    for at most MAX_ROWS rows; start (float32; 0: zero) is the same for all, out is float32. panel: [depth, 32] as in `product`.
    """
    number, in_pairs = kind.literal_value, bool(paired.literal_value)

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        rows, out, out_stride, low, low_stride, first, second, panel, depth, start, *_ = args
        offsets = (first, second)

        def step(sums: list[Any], vectors: Sequence[int], i: Any, count: int) -> None:
            base = builder.mul(i, I64(PANEL))
            for v in vectors:
                index = builder.add(base, I64(v * LANES))
                if in_pairs:
                    columns = builder.load(pointer_at(builder, panel, index, I32, PAIRS), align=4)
                else:
                    columns = load_vector(builder, panel, index, number)
                for r in range(count):
                    at = builder.add(builder.mul(low_stride, I64(r)), offsets[v])
                    if in_pairs:
                        pointer = pointer_at(builder, low, builder.add(at, builder.mul(i, I64(2))), I16, FLOAT)
                        factor = builder.bitcast(broadcast(builder, builder.load(pointer, align=2)), PAIRS)
                        add_pairs(builder, sums[2 * r + v], factor, columns)
                    else:
                        pointer = pointer_at(builder, low, builder.add(at, i), element_type(number))
                        scalar = widen(builder, builder.load(pointer, align=element_bytes(number)), number, 1)
                        add_product(builder, sums[2 * r + v], broadcast(builder, scalar), columns)

        def tile(count: int) -> None:
            at_once = min(2, vectors_at_once(count))
            for begin in range(0, 2, at_once):
                sums, vectors = zeros(builder, 2 * count), range(begin, begin + at_once)
                with builder.if_then(builder.icmp_signed("!=", start, I64(0))):
                    for r in range(count):
                        for v in vectors:
                            builder.store(load_vector(builder, start, I64(v * LANES), F32), sums[2 * r + v])
                with cgutils.for_range(builder, builder.udiv(depth, I64(2)) if in_pairs else depth) as i:
                    step(sums, vectors, i.index, count)
                for r in range(count):
                    for v in vectors:
                        index = builder.add(builder.mul(out_stride, I64(r)), I64(v * LANES))
                        store_vector(builder, builder.load(sums[2 * r + v]), out, index, F32)

        switch(builder, rows, MAX_ROWS, tile)
        return context.get_dummy_value()

    return types.void(*(types.int64,) * 10, kind, paired), emit
