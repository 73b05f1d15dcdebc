"""x W^T + b in eight-bit numbers: each column of W has its own scale, and each row of x gets one when it is quantized.

Scales are per row and never per tensor, so that a sequence's result does not depend on the rest of the batch. Products
are of unsigned by signed bytes, in AMX tiles or four to a lane (AVX512_VNNI), with the same sums; x is shifted by 128 to be
unsigned, and the sums begin at the correction for this shift.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from llvmlite import ir
from llvmlite.binding import get_host_cpu_features
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from engine.cpu.kernels.compiled import kernel
from engine.cpu.kernels.emit import (
    BYTE,
    F32,
    FIRST,
    FLOAT,
    I32,
    I64,
    LANES,
    MAX_ROWS,
    PASSING,
    VECTOR,
    WORDS,
    broadcast,
    greatest_of,
    load_vector,
    pointer_at,
    prefetch_element,
    switch,
    zeros,
)
from engine.cpu.kernels.matmul import piece, place, tile_rows
from engine.cpu.kernels.simd import address_of, load_int, take_ticket
from engine.cpu.kernels.tiles import ADD, GATE, ONCE, PANEL, STEPS_AHEAD, SURELY_ONCE, WIDEN, end_row

TASK_ROWS = 16
"""Rows that one worker quantises at a time."""


@cache
def has_int8_dot() -> bool:
    """Whether this CPU multiplies bytes four at a time."""
    return bool(get_host_cpu_features().get("avx512vnni"))


@intrinsic(prefer_literal=True)
def quantise_row(typing_context: Any, out: Any, scale: Any, x: Any, inner: Any, kind: Any) -> Any:
    """out[i] = round(x[i] / scale) + 128 as bytes, scale = max |x| / 127 stored as float32; `inner` a
    multiple of 16.
    """
    number = kind.literal_value

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        out, scale, x, inner, _ = args
        steps = builder.udiv(inner, I64(LANES))
        (highest,) = zeros(builder, 1)
        absolute = cgutils.get_or_insert_function(builder.module, ir.FunctionType(VECTOR, [VECTOR]), "llvm.fabs.v16f32")
        with cgutils.for_range(builder, steps) as i:
            value = builder.call(absolute, [load_vector(builder, x, builder.mul(i.index, I64(LANES)), number)])
            larger = builder.fcmp_ordered(">", value, builder.load(highest))
            builder.store(builder.select(larger, value, builder.load(highest)), highest)
        largest = greatest_of(builder, builder.load(highest))
        largest = builder.select(builder.fcmp_ordered(">", largest, FLOAT(0.0)), largest, FLOAT(127.0))
        builder.store(builder.fdiv(largest, FLOAT(127.0)), pointer_at(builder, scale, I64(0), FLOAT))
        inverse = broadcast(builder, builder.fdiv(FLOAT(127.0), largest))
        middle = ir.Constant(VECTOR, [128.5] * LANES)
        with cgutils.for_range(builder, steps) as i:
            index = builder.mul(i.index, I64(LANES))
            moved = builder.fadd(builder.fmul(load_vector(builder, x, index, number), inverse), middle)
            small = builder.trunc(builder.fptoui(moved, WORDS), ir.VectorType(BYTE, LANES))
            builder.store(small, pointer_at(builder, out, index, BYTE, ir.VectorType(BYTE, LANES)), align=1)
        return context.get_dummy_value()

    return types.void(*(types.int64,) * 4, kind), emit


@intrinsic(prefer_literal=True)
def byte_product(
    typing_context: Any,
    rows: Any, out: Any, out_stride: Any, x: Any, scales: Any, panel: Any, inner: Any, begin: Any, weight_scales: Any,
    start: Any, ahead: Any, kind: Any, ending: Any,
) -> Any:  # fmt: skip
    """out[r, :32] = (begin[:32] + sum over i of x[r, i] * panel[i, :32]) * scales[r] * weight_scales[:32] + start[:32].

    For 1 to MAX_ROWS rows. x: bytes [rows, inner]. panel: [inner / 4, 32, 4] signed bytes. begin: int32. start: float32, 0:
    zero. ahead: ONCE or 0. It and `ending` as in `product`.
    """
    number, then = kind.literal_value, ending.literal_value

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        rows, out, out_stride, x, scales, panel, inner, begin, weight_scales, start, ahead, *_ = args
        dot = cgutils.get_or_insert_function(
            builder.module, ir.FunctionType(WORDS, [WORDS] * 3), "llvm.x86.avx512.vpdpbusd.512"
        )

        def words_at(address: Any, index: Any) -> Any:
            return builder.load(pointer_at(builder, address, index, I32, WORDS), align=4)

        def add_up(sums: list[Any], count: int, where: int) -> None:
            with cgutils.for_range(builder, builder.udiv(inner, I64(4))) as i:
                for v in range(2):
                    later = builder.mul(builder.add(i.index, I64(STEPS_AHEAD)), I64(PANEL))
                    prefetch_element(builder, panel, builder.add(later, I64(v * LANES)), F32, where)
                columns = [
                    words_at(panel, builder.add(builder.mul(i.index, I64(PANEL)), I64(v * LANES))) for v in range(2)
                ]
                for r in range(count):
                    row = builder.add(x, builder.mul(inner, I64(r)))
                    four = builder.load(pointer_at(builder, row, i.index, I32), align=1)
                    undefined = ir.Constant(WORDS, ir.Undefined)
                    first = builder.insert_element(undefined, four, I32(0))
                    factor = builder.shuffle_vector(first, first, ir.Constant(WORDS, [0] * LANES))
                    for v in range(2):
                        total = sums[2 * r + v]
                        builder.store(builder.call(dot, [builder.load(total), factor, columns[v]]), total)

        def tile(count: int) -> None:
            sums = [cgutils.alloca_once(builder, WORDS) for _ in range(2 * count)]
            for number_of, one in enumerate(sums):
                builder.store(words_at(begin, I64(number_of % 2 * LANES)), one)
            if count <= SURELY_ONCE:
                add_up(sums, count, PASSING)
            else:
                with builder.if_else(builder.icmp_signed("==", ahead, I64(ONCE))) as (once, again):
                    with once:
                        add_up(sums, count, PASSING)
                    with again:
                        add_up(sums, count, FIRST)
            for r in range(count):
                scale = broadcast(builder, builder.load(pointer_at(builder, scales, I64(r), FLOAT)))
                parts = []
                for v in range(2):
                    wide = builder.sitofp(builder.load(sums[2 * r + v]), VECTOR)
                    both = builder.fmul(scale, load_vector(builder, weight_scales, I64(v * LANES), F32))
                    parts.append(builder.fmul(wide, both))
                held = [cgutils.alloca_once_value(builder, part) for part in parts]
                with builder.if_then(builder.icmp_signed("!=", start, I64(0))):
                    for v in range(2):
                        moved = builder.fadd(builder.load(held[v]), load_vector(builder, start, I64(v * LANES), F32))
                        builder.store(moved, held[v])
                row = builder.mul(out_stride, I64(r))
                end_row(builder, [builder.load(one) for one in held], out, row, number, then)

        switch(builder, rows, MAX_ROWS, tile)
        return context.get_dummy_value()

    return types.void(*(types.int64,) * 11, kind, ending), emit


@cache
def quantise_kernel(kind: int) -> Any:
    """Each row of x in bytes. Arguments: see `int8_kernel` and `tile_product_kernel`, one of which comes after it."""
    element = 4 if kind == F32 else 2

    @kernel
    def quantise(data: Any) -> None:
        a = address_of(data)
        rows, inner, x, x_stride = load_int(a, 2), load_int(a, 3), load_int(a, 5), load_int(a, 6)
        small, scales, apart = load_int(a, 13), load_int(a, 14), load_int(a, 15)
        while True:
            first = take_ticket(a) * TASK_ROWS
            if first >= rows:
                return
            for row in range(first, min(rows, first + TASK_ROWS)):
                quantise_row(small + row * apart, scales + 4 * row, x + row * x_stride * element, inner, kind)

    return quantise


@cache
def int8_kernel(kind: int, ending: int) -> Any:
    """Arguments: rows, inner, panels; x, its stride; weight [panels, width / 4, 32, 4]; its scales float32 and begins
    int32, [panels * 32]; start (0: none); out, its stride; x in bytes, and its scales, as `quantise_kernel` left them;
    width, the bytes of a row of x and between its rows; workers.
    """
    out_element = 4 if ending in (ADD, WIDEN) or kind == F32 else 2
    columns = LANES if ending == GATE else PANEL

    @kernel
    def multiply(data: Any) -> None:
        a = address_of(data)
        rows, panels, width = load_int(a, 2), load_int(a, 4), load_int(a, 15)
        weight, weight_scales, begins, start = load_int(a, 7), load_int(a, 8), load_int(a, 9), load_int(a, 10)
        out, stride, small, scales = load_int(a, 11), load_int(a, 12), load_int(a, 13), load_int(a, 14)
        tile = tile_rows(rows)
        panels_each, rows_each = piece(rows, tile, panels, width * PANEL, load_int(a, 16))
        pieces, across = (panels + panels_each - 1) // panels_each, (rows + rows_each - 1) // rows_each
        while True:
            ticket = take_ticket(a)
            if ticket >= pieces * across:
                break
            panel_piece, row_piece = place(ticket, pieces, across, load_int(a, 16))
            first_panel, head = panel_piece * panels_each, row_piece * rows_each
            for panel in range(first_panel, min(first_panel + panels_each, panels)):
                column = 4 * panel * PANEL
                for first in range(head, min(head + rows_each, rows), tile):
                    count = min(tile, rows - first)
                    target, bytes_of_rows = (
                        out + (first * stride + panel * columns) * out_element,
                        small + first * width,
                    )
                    begin, factors, bias = begins + column, weight_scales + column, start + column if start else 0
                    own, panel_of = scales + 4 * first, weight + panel * width * PANEL
                    byte_product(
                        count, target, stride, bytes_of_rows, own, panel_of, width, begin, factors, bias,
                        ONCE if rows <= tile else 0, kind, ending,
                    )  # fmt: skip

    return multiply
