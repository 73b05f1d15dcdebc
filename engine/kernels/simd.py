"""The vector operations that the kernels are made of, as Numba intrinsics over plain addresses.

An address is an int64; strides and indices count elements. `kind` is the type of the elements in memory (F32, BF16,
F16) and has to be a compile-time constant; arithmetic is float32 throughout. Nothing here checks bounds.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

from llvmlite import ir
from llvmlite.binding import get_host_cpu_features
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

F32, BF16, F16 = 0, 1, 2
LANES = 16
"""float32 numbers in one vector: one AVX-512 register, two of AVX2, four of NEON."""
MAX_ROWS = 12
"""Rows of one tile: with two vectors each their sums fill 24 of the 32 AVX-512 registers."""
MAX_VALUE_ROWS, MAX_VALUE_VECTORS = 6, 4

_F32 = ir.FloatType()
_I16, _I32, _I64 = ir.IntType(16), ir.IntType(32), ir.IntType(64)
_VECTOR = ir.VectorType(_F32, LANES)


@cache
def has_bf16_dot() -> bool:
    """Whether this CPU multiplies pairs of bfloat16 numbers and adds them up in float32 (AVX512_BF16)."""
    return bool(get_host_cpu_features().get("avx512bf16"))


def _element(kind: int) -> ir.Type:
    return {F32: _F32, BF16: _I16, F16: ir.HalfType()}[kind]


def _size(kind: int) -> int:
    return 4 if kind == F32 else 2


def _at(builder: Any, address: Any, index: Any, kind_type: ir.Type, pointee: ir.Type | None = None) -> Any:
    """A pointer to element `index`. Indexed as a pointer, not as a number, or LLVM would not make loops vector code."""
    base = builder.inttoptr(address, ir.PointerType(kind_type))
    pointer = builder.gep(base, [index])
    return pointer if pointee is None else builder.bitcast(pointer, ir.PointerType(pointee))


def _widen(builder: Any, raw: Any, kind: int, lanes: int) -> Any:
    """What was loaded as `kind`, as float32: a bfloat16 is the upper half of a float32."""
    if kind == F32:
        return raw
    wide = _F32 if lanes == 1 else ir.VectorType(_F32, lanes)
    if kind == F16:
        return builder.fpext(raw, wide)
    bits = _I32 if lanes == 1 else ir.VectorType(_I32, lanes)
    shift = ir.Constant(bits, 16 if lanes == 1 else [16] * lanes)
    return builder.bitcast(builder.shl(builder.zext(raw, bits), shift), wide)


def _load_vector(builder: Any, address: Any, index: Any, kind: int) -> Any:
    pointer = _at(builder, address, index, _element(kind), ir.VectorType(_element(kind), LANES))
    return _widen(builder, builder.load(pointer, align=_size(kind)), kind, LANES)


def _broadcast(builder: Any, scalar: Any) -> Any:
    first = builder.insert_element(ir.Constant(_VECTOR, ir.Undefined), scalar, _I32(0))
    return builder.shuffle_vector(first, first, ir.Constant(ir.VectorType(_I32, LANES), [0] * LANES))


@intrinsic(prefer_literal=True)
def load(typing_context: Any, address: Any, index: Any, kind: Any) -> Any:
    """The element at `index`, as float32."""
    number = kind.literal_value

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        pointer = _at(builder, args[0], args[1], _element(number))
        return _widen(builder, builder.load(pointer, align=_size(number)), number, 1)

    return types.float32(types.int64, types.int64, kind), emit


@intrinsic(prefer_literal=True)
def store(typing_context: Any, address: Any, index: Any, kind: Any, value: Any) -> Any:
    """Round `value` to the nearest number of the kind (ties to even) and store it at `index`."""
    number = kind.literal_value

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        value = args[3]
        if number == F16:
            value = builder.fptrunc(value, ir.HalfType())
        elif number == BF16:
            bits = builder.bitcast(value, _I32)
            odd = builder.and_(builder.lshr(bits, _I32(16)), _I32(1))
            rounded = builder.add(bits, builder.add(odd, _I32(0x7FFF)))
            value = builder.trunc(builder.lshr(rounded, _I32(16)), _I16)
        builder.store(value, _at(builder, args[0], args[1], _element(number)), align=_size(number))
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, kind, types.float32), emit


@intrinsic
def load_int(typing_context: Any, address: Any, index: Any) -> Any:
    """The int64 at `index`."""

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.load(_at(builder, args[0], args[1], _I64))

    return types.int64(types.int64, types.int64), emit


@intrinsic
def as_float(typing_context: Any, bits: Any) -> Any:
    """The float32 whose bits are the lower half of an int64."""

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.bitcast(builder.trunc(args[0], _I32), _F32)

    return types.float32(types.int64), emit


@intrinsic
def take_ticket(typing_context: Any, address: Any) -> Any:
    """Add one to the int64 at `address` atomically; returns what it was."""

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.atomic_rmw("add", builder.inttoptr(args[0], ir.PointerType(_I64)), _I64(1), "acq_rel")

    return types.int64(types.int64), emit


@intrinsic
def address_of(typing_context: Any, pointer: Any) -> Any:
    """A void pointer as an address."""

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.ptrtoint(args[0], _I64)

    return types.int64(types.voidptr), emit


@intrinsic
def exp(typing_context: Any, x: Any) -> Any:
    """e to the x in float32, for x <= 88; under -87 it is about 1e-38. Within 2 units of the last place.

    Cephes' expf: x = n ln 2 + r, a polynomial in r, and n put into the exponent. Branch-free, so that loops of it
    become vector code.
    """

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        def number(value: float) -> Any:
            return ir.Constant(_F32, float(value))

        def fma(a: Any, b: Any, c: Any) -> Any:
            return builder.fma(a, b, c)

        low = builder.fcmp_ordered("<", args[0], number(-87.0))
        x = builder.select(low, number(-87.0), args[0])
        floor = cgutils.get_or_insert_function(builder.module, ir.FunctionType(_F32, [_F32]), "llvm.floor.f32")
        n = builder.call(floor, [fma(x, number(1.44269504088896341), number(0.5))])
        r = fma(n, number(-0.693359375), x)
        r = fma(n, number(2.12194440e-4), r)
        p = number(1.9875691500e-4)
        for coefficient in (1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1):
            p = fma(p, r, number(coefficient))
        p = builder.fadd(fma(builder.fmul(p, r), r, r), number(1.0))
        power = builder.shl(builder.add(builder.fptosi(n, _I32), _I32(127)), _I32(23))
        return builder.fmul(p, builder.bitcast(power, _F32))

    return types.float32(types.float32), emit


def _switch(builder: Any, value: Any, count: int, body: Callable[[int], None]) -> None:
    """`body(n)` for value == n in 1..count; other values do nothing."""
    done = builder.append_basic_block("done")
    choice = builder.switch(value, done)
    for n in range(1, count + 1):
        block = builder.append_basic_block(f"case{n}")
        choice.add_case(_I64(n), block)
        with builder.goto_block(block):
            body(n)
            builder.branch(done)
    builder.position_at_end(done)


def _zeros(builder: Any, count: int) -> list[Any]:
    sums = [cgutils.alloca_once(builder, _VECTOR) for _ in range(count)]
    for one in sums:
        builder.store(ir.Constant(_VECTOR, [0.0] * LANES), one)
    return sums


def _add_product(builder: Any, total: Any, a: Any, b: Any) -> None:
    signature = ir.FunctionType(_VECTOR, [_VECTOR] * 3)
    fma = cgutils.get_or_insert_function(builder.module, signature, f"llvm.fma.v{LANES}f32")
    builder.store(builder.call(fma, [a, b, builder.load(total)]), total)


_SCORES_ARGS = (types.int64,) * 11


@intrinsic(prefer_literal=True)
def scores(  # noqa: D417
    typing_context: Any,
    rows: Any, out: Any, out_stride: Any, query: Any, dim: Any,
    keys: Any, table: Any, block_stride: Any, padded_size: Any, first: Any, groups: Any, kind: Any,
) -> Any:  # fmt: skip
    """out[r, g * 16 + lane] = query[r] . key, for groups of 16 keys; an odd last group is computed twice.

    query: [rows, dim] float32. keys: blocks of [dim, padded_size] elements, `block_stride` apart, found through the
    int64 `table`; group g lies at lanes (g % (padded_size / 16)) * 16 of block `table[g // (padded_size / 16)]`.
    out: float32, rows `out_stride` apart, with room for an even number of groups, group `first` at its start.
    """
    number = kind.literal_value

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        rows, out, out_stride, query, dim, keys, table, block_stride, padded_size, first, groups, _ = args
        per_block = builder.udiv(padded_size, _I64(LANES))
        pairs = builder.udiv(builder.add(groups, _I64(1)), _I64(2))

        def start(group: Any) -> Any:
            absolute = builder.add(first, group)
            block = builder.load(_at(builder, table, builder.udiv(absolute, per_block), _I64))
            lane = builder.mul(builder.urem(absolute, per_block), _I64(LANES))
            return builder.add(builder.mul(block, block_stride), lane)

        def tile(count: int) -> None:
            with cgutils.for_range(builder, pairs) as pair:
                group = builder.mul(pair.index, _I64(2))
                following = builder.add(group, _I64(1))
                last = builder.icmp_signed("<", following, groups)
                starts = [start(group), start(builder.select(last, following, group))]
                sums = _zeros(builder, 2 * count)
                with cgutils.for_range(builder, dim) as d:
                    step = builder.mul(d.index, padded_size)
                    key = [_load_vector(builder, keys, builder.add(s, step), number) for s in starts]
                    for r in range(count):
                        index = builder.add(builder.mul(dim, _I64(r)), d.index)
                        q = _broadcast(builder, builder.load(_at(builder, query, index, _F32)))
                        _add_product(builder, sums[2 * r], q, key[0])
                        _add_product(builder, sums[2 * r + 1], q, key[1])
                for r in range(count):
                    for half in range(2):
                        lane = builder.add(builder.mul(group, _I64(LANES)), _I64(half * LANES))
                        index = builder.add(builder.mul(out_stride, _I64(r)), lane)
                        builder.store(builder.load(sums[2 * r + half]), _at(builder, out, index, _F32, _VECTOR), align=4)

        _switch(builder, rows, MAX_ROWS, tile)
        return context.get_dummy_value()

    return types.void(*_SCORES_ARGS, kind), emit


_VALUES_ARGS = (types.int64,) * 15


@intrinsic(prefer_literal=True)
def weighted_values(  # noqa: D417
    typing_context: Any,
    rows: Any, vectors: Any, out: Any, out_stride: Any, weights: Any, weights_stride: Any,
    values: Any, table: Any, block_stride: Any, block_size: Any, padded_size: Any, value_stride: Any,
    first: Any, blocks: Any, in_last: Any, kind: Any,
) -> Any:  # fmt: skip
    """out[r, :16 * vectors] = sum over keys of weights[r, key] * value[key].

    values: blocks of [block_size, value_stride] elements, `block_stride` apart, found through the int64 `table` from
    its entry `first` on; of the last block only the first `in_last` keys are read. weights: float32, rows `weights_stride` apart, `padded_size` lanes a block.
    """
    number = kind.literal_value

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        (rows, vectors, out, out_stride, weights, weights_stride, values, table, block_stride, block_size,
         padded_size, value_stride, first, blocks, in_last, _) = args  # fmt: skip

        def tile(count: int, width: int) -> None:
            sums = _zeros(builder, count * width)
            with cgutils.for_range(builder, blocks) as b:
                block = builder.load(_at(builder, table, builder.add(first, b.index), _I64))
                base = builder.mul(block, block_stride)
                lanes = builder.mul(b.index, padded_size)
                is_last = builder.icmp_signed("==", builder.add(b.index, _I64(1)), blocks)
                with cgutils.for_range(builder, builder.select(is_last, in_last, block_size)) as j:
                    row = builder.add(base, builder.mul(j.index, value_stride))
                    value = [
                        _load_vector(builder, values, builder.add(row, _I64(v * LANES)), number) for v in range(width)
                    ]
                    for r in range(count):
                        index = builder.add(builder.mul(weights_stride, _I64(r)), builder.add(lanes, j.index))
                        w = _broadcast(builder, builder.load(_at(builder, weights, index, _F32)))
                        for v in range(width):
                            _add_product(builder, sums[r * width + v], w, value[v])
            for r in range(count):
                for v in range(width):
                    index = builder.add(builder.mul(out_stride, _I64(r)), _I64(v * LANES))
                    builder.store(builder.load(sums[r * width + v]), _at(builder, out, index, _F32, _VECTOR), align=4)

        def by_width(count: int) -> None:
            _switch(builder, vectors, MAX_VALUE_VECTORS, lambda width: tile(count, width))

        _switch(builder, rows, MAX_VALUE_ROWS, by_width)
        return context.get_dummy_value()

    return types.void(*_VALUES_ARGS, kind), emit


class _BFloat(ir.Type):
    """LLVM's bfloat, which llvmlite has no class for."""

    def _to_string(self) -> str:
        return "bfloat"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _BFloat)

    def __hash__(self) -> int:
        return hash(_BFloat)


_PAIRS = ir.VectorType(_BFloat(), 2 * LANES)
PANEL = 2 * LANES
"""Columns of a weight that lie together; with MAX_ROWS rows a tile of sums fills 24 registers."""


def _store_vector(builder: Any, value: Any, address: Any, index: Any, kind: int) -> None:
    """Round to the kind, ties to even, and store."""
    stored = ir.VectorType(_element(kind), LANES)
    if kind == F16:
        value = builder.fptrunc(value, stored)
    elif kind == BF16:
        words = ir.VectorType(_I32, LANES)

        def number(n: int) -> Any:
            return ir.Constant(words, [n] * LANES)

        bits = builder.bitcast(value, words)
        odd = builder.and_(builder.lshr(bits, number(16)), number(1))
        bits = builder.add(bits, builder.add(odd, number(0x7FFF)))
        value = builder.trunc(builder.lshr(bits, number(16)), stored)
    builder.store(value, _at(builder, address, index, _element(kind), stored), align=_size(kind))


_PRODUCT_ARGS = (types.int64,) * 8


@intrinsic(prefer_literal=True)
def product(  # noqa: D417
    typing_context: Any,
    rows: Any, out: Any, out_stride: Any, x: Any, x_stride: Any, panel: Any, inner: Any, bias: Any,
    kind: Any, paired: Any,
) -> Any:  # fmt: skip
    """out[r, :32] = sum over i of x[r, i] * panel[i, :32], plus bias[:32] (float32; 0: none), for at most 12 rows.

    x and out are of `kind`. panel: [inner, 32], or where `paired` [inner / 2, 32, 2] bfloat16, two steps of the sum
    side by side, as AVX512_BF16's dot product wants them. The order of the sum is that of i, whatever the rows.
    """
    number, in_pairs = kind.literal_value, bool(paired.literal_value)

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        rows, out, out_stride, x, x_stride, panel, inner, bias, *_ = args
        if in_pairs:
            dot = cgutils.get_or_insert_function(
                builder.module,
                ir.FunctionType(_VECTOR, [_VECTOR, _PAIRS, _PAIRS]),
                "llvm.x86.avx512bf16.dpbf16ps.512",
            )

        def step(sums: list[Any], i: Any, count: int) -> None:
            base = builder.mul(i, _I64(PANEL))
            if in_pairs:
                columns = [
                    builder.load(_at(builder, panel, builder.add(base, _I64(v * LANES)), _I32, _PAIRS), align=4)
                    for v in range(2)
                ]
            else:
                columns = [
                    _load_vector(builder, panel, builder.add(base, _I64(v * LANES)), number) for v in range(2)
                ]
            for r in range(count):
                index = builder.mul(x_stride, _I64(r))
                if in_pairs:
                    index = builder.add(index, builder.mul(i, _I64(2)))
                    pair = builder.load(_at(builder, x, index, _I16, _F32), align=2)
                    factor = builder.bitcast(_broadcast(builder, pair), _PAIRS)
                else:
                    pointer = _at(builder, x, builder.add(index, i), _element(number))
                    scalar = _widen(builder, builder.load(pointer, align=_size(number)), number, 1)
                    factor = _broadcast(builder, scalar)
                for v in range(2):
                    total = sums[2 * r + v]
                    if in_pairs:
                        builder.store(builder.call(dot, [builder.load(total), factor, columns[v]]), total)
                    else:
                        _add_product(builder, total, factor, columns[v])

        def tile(count: int) -> None:
            sums = _zeros(builder, 2 * count)
            with builder.if_then(builder.icmp_signed("!=", bias, _I64(0))):
                for r in range(count):
                    for v in range(2):
                        builder.store(_load_vector(builder, bias, _I64(v * LANES), F32), sums[2 * r + v])
            steps = builder.udiv(inner, _I64(2)) if in_pairs else inner
            with cgutils.for_range(builder, steps) as i:
                step(sums, i.index, count)
            for r in range(count):
                for v in range(2):
                    index = builder.add(builder.mul(out_stride, _I64(r)), _I64(v * LANES))
                    _store_vector(builder, builder.load(sums[2 * r + v]), out, index, number)

        _switch(builder, rows, MAX_ROWS, tile)
        return context.get_dummy_value()

    return types.void(*_PRODUCT_ARGS, kind, paired), emit
