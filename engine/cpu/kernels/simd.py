"""Scalar operations on memory as Numba intrinsics; loops of them become vector code. Nothing here checks bounds.

`kind` (F32, BF16, F16) has to be a compile-time constant.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from engine.cpu.kernels.compiled import inlined
from engine.cpu.kernels.emit import (
    F32,
    FLOAT,
    I16,
    I32,
    I64,
    LANES,
    LINE_BYTES,
    broadcast,
    element_bytes,
    element_type,
    exponential,
    greatest_of,
    load_vector,
    pointer_at,
    prefetch,
    store_element,
    widen,
)


@intrinsic(prefer_literal=True)
def load(typing_context: Any, address: Any, index: Any, kind: Any) -> Any:
    """The element at `index`, as float32."""
    number = kind.literal_value

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        pointer = pointer_at(builder, args[0], args[1], element_type(number))
        return widen(builder, builder.load(pointer, align=element_bytes(number)), number, 1)

    return types.float32(types.int64, types.int64, kind), emit


@intrinsic(prefer_literal=True)
def store(typing_context: Any, address: Any, index: Any, kind: Any, value: Any) -> Any:
    """Round `value` to the nearest number of the kind (ties to even) and store it at `index`."""
    number = kind.literal_value

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        store_element(builder, args[3], args[0], args[1], number)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, kind, types.float32), emit


@intrinsic
def load_int(typing_context: Any, address: Any, index: Any) -> Any:
    """The int64 at `index`."""

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.load(pointer_at(builder, args[0], args[1], I64))

    return types.int64(types.int64, types.int64), emit


@intrinsic
def load_double(typing_context: Any, address: Any, index: Any) -> Any:
    """The float64 at `index`."""

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.load(pointer_at(builder, args[0], args[1], ir.DoubleType()))

    return types.float64(types.int64, types.int64), emit


@intrinsic
def store_int(typing_context: Any, address: Any, index: Any, value: Any) -> Any:
    """Store an int64 at `index`."""

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        builder.store(args[2], pointer_at(builder, args[0], args[1], I64))
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64), emit


@intrinsic
def copy_words(typing_context: Any, out: Any, stride: Any, source: Any, count: Any) -> Any:
    """Copy `count` words of 4 bytes to `out`, `stride` words apart."""

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        out, stride, source, count = args
        with cgutils.for_range(builder, count) as loop:
            word = builder.load(pointer_at(builder, source, loop.index, I32), align=2)
            builder.store(word, pointer_at(builder, out, builder.mul(loop.index, stride), I32), align=2)
        return context.get_dummy_value()

    return types.void(*(types.int64,) * 4), emit


@intrinsic
def fill_half(typing_context: Any, out: Any, half: Any, source: Any, count: Any) -> Any:
    """out[2 * i + half] = source[i] for `count` numbers of 16 bits, 16 at a time and without touching the other halves, which
    another thread may be writing. `half` is 0 or 1.
    """
    numbers, words, halves = ir.VectorType(I16, LANES), ir.VectorType(I32, LANES), ir.VectorType(I16, 2 * LANES)
    mask = ir.VectorType(ir.IntType(1), 2 * LANES)

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        out, half, source, count = args
        name, pointer = "llvm.masked.store.v32i16.p0", ir.PointerType(halves)
        masked = cgutils.get_or_insert_function(
            builder.module, ir.FunctionType(ir.VoidType(), [halves, pointer, I32, mask]), name
        )
        odd = builder.icmp_signed("!=", half, I64(0))
        first, second = (ir.Constant(mask, [0, 1] * LANES), ir.Constant(mask, [1, 0] * LANES))
        chosen = builder.select(odd, first, second)
        vectors = builder.udiv(count, I64(LANES))
        with cgutils.for_range(builder, vectors) as loop:
            index = builder.mul(loop.index, I64(LANES))
            wide = builder.zext(builder.load(pointer_at(builder, source, index, I16, numbers), align=2), words)
            shifted = builder.select(odd, builder.shl(wide, ir.Constant(words, [16] * LANES)), wide)
            there = pointer_at(builder, out, builder.mul(index, I64(2)), I16, halves)
            builder.call(masked, [builder.bitcast(shifted, halves), there, I32(2), chosen])
        with cgutils.for_range_slice(builder, builder.mul(vectors, I64(LANES)), count, I64(1)) as (i, _):
            there = pointer_at(builder, out, builder.add(builder.mul(i, I64(2)), half), I16)
            builder.store(builder.load(pointer_at(builder, source, i, I16), align=2), there, align=2)
        return context.get_dummy_value()

    return types.void(*(types.int64,) * 4), emit


@intrinsic
def as_float(typing_context: Any, bits: Any) -> Any:
    """The float32 whose bits are the lower half of an int64."""

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.bitcast(builder.trunc(args[0], I32), FLOAT)

    return types.float32(types.int64), emit


@intrinsic(prefer_literal=True)
def reserve(typing_context: Any, size: Any) -> Any:
    """The address of `size` bytes, a constant, which are this call's own; it begins a cache line."""
    number = size.literal_value

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        area = cgutils.alloca_once(builder, ir.ArrayType(ir.IntType(8), number))
        area.align = LINE_BYTES
        return builder.ptrtoint(area, I64)

    return types.int64(size), emit


@intrinsic
def take_ticket(typing_context: Any, address: Any) -> Any:
    """Add one to the int64 at `address` atomically; returns what it was."""

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.atomic_rmw("add", builder.inttoptr(args[0], ir.PointerType(I64)), I64(1), "acq_rel")

    return types.int64(types.int64), emit


@intrinsic
def add_atomic(typing_context: Any, address: Any, value: Any) -> Any:
    """Add to the int64 at `address` atomically; returns what it was."""

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.atomic_rmw("add", builder.inttoptr(args[0], ir.PointerType(I64)), args[1], "seq_cst")

    return types.int64(types.int64, types.int64), emit


@intrinsic
def exchange(typing_context: Any, address: Any, value: Any) -> Any:
    """Put another number into the int64 at `address` atomically; returns what it was."""

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.atomic_rmw("xchg", builder.inttoptr(args[0], ir.PointerType(I64)), args[1], "seq_cst")

    return types.int64(types.int64, types.int64), emit


@intrinsic
def compare_exchange(typing_context: Any, address: Any, expected: Any, value: Any) -> Any:
    """Put `value` into the int64 at `address` if it is the expected one, atomically; returns whether it was."""

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        pointer = builder.inttoptr(args[0], ir.PointerType(I64))
        pair = builder.cmpxchg(pointer, args[1], args[2], "seq_cst", "seq_cst")
        return builder.zext(builder.extract_value(pair, 1), I64)

    return types.int64(types.int64, types.int64, types.int64), emit


@intrinsic
def call_kernel(typing_context: Any, function: Any, data: Any) -> Any:
    """Call the C function `void f(void *data)` at an address."""

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        pointer = builder.inttoptr(args[0], ir.PointerType(ir.FunctionType(ir.VoidType(), [I64])))
        builder.call(pointer, [args[1]])
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), emit


@intrinsic
def call_system(typing_context: Any, function: Any, number: Any, first: Any, second: Any, third: Any) -> Any:
    """Linux's system call of that number through libc's `syscall`, whose address is `function`; other
    arguments are 0.
    """

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        pointer = builder.inttoptr(args[0], ir.PointerType(ir.FunctionType(I64, [I64] * 7)))
        return builder.call(pointer, [*args[1:], I64(0), I64(0), I64(0)])

    return types.int64(*(types.int64,) * 5), emit


@intrinsic
def clock_ns(typing_context: Any, function: Any) -> Any:
    """Monotonic nanoseconds, by libc's `clock_gettime`, whose address is `function`."""

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        timespec = cgutils.alloca_once(builder, ir.ArrayType(I64, 2))
        address = builder.ptrtoint(timespec, I64)
        pointer = builder.inttoptr(args[0], ir.PointerType(ir.FunctionType(I32, [I32, I64])))
        builder.call(pointer, [I32(1), address])  # 1: CLOCK_MONOTONIC
        seconds, rest = (builder.load(pointer_at(builder, address, I64(i), I64)) for i in range(2))
        return builder.add(builder.mul(seconds, I64(1_000_000_000)), rest)

    return types.int64(types.int64), emit


@intrinsic
def lost_core(typing_context: Any, function: Any, number: Any) -> Any:
    """How often this thread was preempted: `ru_nivcsw` of getrusage(RUSAGE_THREAD),
    which is the system call of that number, through libc's `syscall`, whose address is `function`.
    """

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        usage = cgutils.alloca_once(builder, ir.ArrayType(I64, 18))
        address = builder.ptrtoint(usage, I64)
        pointer = builder.inttoptr(args[0], ir.PointerType(ir.FunctionType(I64, [I64] * 3)))
        builder.call(pointer, [args[1], I64(1), address])  # 1: RUSAGE_THREAD
        return builder.load(pointer_at(builder, address, I64(17), I64))

    return types.int64(types.int64, types.int64), emit


@intrinsic
def address_of(typing_context: Any, pointer: Any) -> Any:
    """A void pointer as an address."""

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.ptrtoint(args[0], I64)

    return types.int64(types.voidptr), emit


@intrinsic
def exp(typing_context: Any, x: Any) -> Any:
    """E to the x in float32; see `exponential`."""

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return exponential(builder, args[0])

    return types.float32(types.float32), emit


@intrinsic
def load_acquired(typing_context: Any, address: Any) -> Any:
    """Load the int64 at `address` with acquire ordering."""

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.load_atomic(builder.inttoptr(args[0], ir.PointerType(I64)), "acquire", 8)

    return types.int64(types.int64), emit


@intrinsic(prefer_literal=True)
def fetch_ahead(typing_context: Any, address: Any, count: Any, kind: Any) -> Any:
    """Prefetch `count` elements."""
    number = kind.literal_value

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        prefetch(builder, args[0], I64(0), args[1], number)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, kind), emit


@intrinsic
def largest(typing_context: Any, address: Any, begin: Any, end: Any) -> Any:
    """The greatest of the float32 from `begin` to `end`, which is greater; a loop of scalars does not
    become vectors.
    """

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        address, begin, end = args
        first = builder.load(pointer_at(builder, address, begin, FLOAT))
        best = cgutils.alloca_once_value(builder, broadcast(builder, first))
        vectors = builder.udiv(builder.sub(end, begin), I64(LANES))

        def take(vector: Any) -> None:
            greater = builder.fcmp_ordered(">", vector, builder.load(best))
            builder.store(builder.select(greater, vector, builder.load(best)), best)

        with cgutils.for_range(builder, vectors) as i:
            take(load_vector(builder, address, builder.add(begin, builder.mul(i.index, I64(LANES))), F32))
        tail = builder.add(begin, builder.mul(vectors, I64(LANES)))
        with cgutils.for_range(builder, builder.sub(end, tail)) as i:
            take(broadcast(builder, builder.load(pointer_at(builder, address, builder.add(tail, i.index), FLOAT))))
        return greatest_of(builder, builder.load(best))

    return types.float32(types.int64, types.int64, types.int64), emit


@inlined
def task_rows(rows: int) -> int:
    """Rows that a worker takes at a time where each costs little: enough that two workers seldom write to one place."""
    return max(1, min(32, rows // 16))
