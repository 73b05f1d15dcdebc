"""LLVM code for the operations that the intrinsics are made of: typed pointers, vectors of 16, rounding, tiles of sums.

An address is an int64; indices count elements. A `kind` is the type of the elements in memory; arithmetic is float32.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

from llvmlite import ir
from llvmlite.binding import get_host_cpu_features, get_host_cpu_name
from numba.core import cgutils

F32, BF16, F16 = 0, 1, 2
LINE_BYTES = 64
ON_ZEN = get_host_cpu_name().startswith("znver")
"""Whether this is one of AMD's CPUs with AVX-512 or their predecessors."""
FIRST, SECOND = 3, 2
"""Where to prefetch, as LLVM counts: into the first or the second cache."""
PASSING = 0 if ON_ZEN else FIRST
"""Where to prefetch for a single use, after which no cache needs to keep it. Intel reads memory at half of its speed when asked so."""
UNPAIRED, DOT_PAIRS, WIDE_PAIRS, WIDENED = 0, 1, 2, 3
"""How bfloat16 numbers are multiplied: one by one; in pairs that lie side by side, by AVX512_BF16's dot product; such pairs widened
to float32, the first numbers of all pairs in one vector and the second ones in another, beside float32 factors; or float32 numbers that lie
behind each other, in a float32 cache or widened before.
"""
LANES = 16
"""float32 numbers in one vector: one AVX-512 register, two of AVX2, four of NEON."""
FLOAT = ir.FloatType()
BYTE, I16, I32, I64 = ir.IntType(8), ir.IntType(16), ir.IntType(32), ir.IntType(64)
VECTOR = ir.VectorType(FLOAT, LANES)
WORDS = ir.VectorType(I32, LANES)


@cache
def has_avx512() -> bool:
    """Whether this CPU has vectors of 16 float32 numbers, and 32 registers for them."""
    return bool(get_host_cpu_features().get("avx512f"))


@cache
def has_bf16_dot() -> bool:
    """Whether this CPU multiplies pairs of bfloat16 numbers and adds them up in float32 (AVX512_BF16)."""
    return bool(get_host_cpu_features().get("avx512bf16"))


def pairing() -> int:
    """How this CPU multiplies bfloat16 fastest. A dot product takes Zen 4 and 5 as long as one multiplication of float32, Intel's CPUs
    four times as long; CPUs without it widen pairs, so that all keep weights and keys in one order.
    """
    return DOT_PAIRS if has_bf16_dot() and ON_ZEN else WIDE_PAIRS


HELD = 7 if not has_avx512() else 27 if pairing() == WIDE_PAIRS else 28
"""Vectors of 16 that registers hold, sums and what is multiplied: each takes one of AVX-512's 32, elsewhere two of AVX2's 16, or
four of NEON's 32. Sums that they do not hold go through memory with each step, which took AVX2 twice as long.
"""
MAX_ROWS = min(11 if pairing() == WIDE_PAIRS else 12, HELD - 1)
"""Rows whose sums of two vectors beside each other registers hold, or else those of one vector. A vector of widened pairs takes two registers, and a mask
one more: with them the sums of 12 rows overflowed AVX-512's registers, and products took three times as long.
"""


def vectors_at_once(rows: int) -> int:
    """How many vectors beside each other (4, 2 or 1) so many rows are multiplied by at once: registers hold the vectors, which
    a single row reads from memory, and their sums.
    """
    each = rows + 1 if rows > 1 else 1
    return 4 if 4 * each <= HELD else 2 if 2 * each <= HELD else 1


def element_type(kind: int) -> ir.Type:
    """How an element lies in memory; a bfloat16 as its bits."""
    return {F32: FLOAT, BF16: I16, F16: ir.HalfType()}[kind]


def element_bytes(kind: int) -> int:
    """Bytes of one element."""
    return 4 if kind == F32 else 2


def pointer_at(builder: Any, address: Any, index: Any, kind_type: ir.Type, pointee: ir.Type | None = None) -> Any:
    """A pointer to element `index`. Indexed as a pointer, not as a number, or LLVM would not make loops vector code."""
    base = builder.inttoptr(address, ir.PointerType(kind_type))
    pointer = builder.gep(base, [index])
    return pointer if pointee is None else builder.bitcast(pointer, ir.PointerType(pointee))


def widen(builder: Any, raw: Any, kind: int, lanes: int) -> Any:
    """What was loaded as `kind`, as float32: a bfloat16 is the upper half of a float32."""
    if kind == F32:
        return raw
    wide = FLOAT if lanes == 1 else ir.VectorType(FLOAT, lanes)
    if kind == F16:
        return builder.fpext(raw, wide)
    bits = I32 if lanes == 1 else ir.VectorType(I32, lanes)
    shift = ir.Constant(bits, 16 if lanes == 1 else [16] * lanes)
    return builder.bitcast(builder.shl(builder.zext(raw, bits), shift), wide)


def load_vector(builder: Any, address: Any, index: Any, kind: int) -> Any:
    """16 elements from `index` on, as float32."""
    pointer = pointer_at(builder, address, index, element_type(kind), ir.VectorType(element_type(kind), LANES))
    return widen(builder, builder.load(pointer, align=element_bytes(kind)), kind, LANES)


def load_words(builder: Any, address: Any, index: Any) -> Any:
    """16 pairs of bfloat16, which begin at element `index`, as words of 32 bits."""
    return builder.load(pointer_at(builder, address, index, I16, WORDS), align=2)


def halves(builder: Any, words: Any) -> tuple[Any, Any]:
    """The first numbers of 16 pairs of bfloat16, and the second ones, as float32."""
    first = builder.shl(words, ir.Constant(words.type, [16] * LANES))
    second = builder.and_(words, ir.Constant(words.type, [0xFFFF0000] * LANES))
    return builder.bitcast(first, VECTOR), builder.bitcast(second, VECTOR)


def load_pairs(builder: Any, address: Any, index: Any) -> tuple[Any, Any]:
    """16 pairs of bfloat16, which begin at element `index`, as float32: their first numbers and their second ones."""
    return halves(builder, load_words(builder, address, index))


def broadcast(builder: Any, scalar: Any) -> Any:
    """A vector of 16 times the same float32."""
    first = builder.insert_element(ir.Constant(VECTOR, ir.Undefined), scalar, I32(0))
    return builder.shuffle_vector(first, first, ir.Constant(WORDS, [0] * LANES))


class BFloat(ir.Type):
    """LLVM's bfloat, which llvmlite has no class for."""

    def _to_string(self) -> str:
        return "bfloat"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, BFloat)

    def __hash__(self) -> int:
        return hash(BFloat)


PAIRS = ir.VectorType(BFloat(), 2 * LANES)


def store_vector(builder: Any, value: Any, address: Any, index: Any, kind: int) -> None:
    """Round to the kind, ties to even, and store."""
    stored = ir.VectorType(element_type(kind), LANES)
    if kind == F16:
        value = builder.fptrunc(value, stored)
    elif kind == BF16 and has_bf16_dot():
        rounded = ir.VectorType(BFloat(), LANES)
        signature = ir.FunctionType(rounded, [VECTOR])
        convert = cgutils.get_or_insert_function(builder.module, signature, "llvm.x86.avx512bf16.cvtneps2bf16.512")
        value = builder.bitcast(builder.call(convert, [value]), stored)
    elif kind == BF16:

        def number(n: int) -> Any:
            return ir.Constant(WORDS, [n] * LANES)

        bits = builder.bitcast(value, WORDS)
        odd = builder.and_(builder.lshr(bits, number(16)), number(1))
        bits = builder.add(bits, builder.add(odd, number(0x7FFF)))
        value = builder.trunc(builder.lshr(bits, number(16)), stored)
    builder.store(value, pointer_at(builder, address, index, element_type(kind), stored), align=element_bytes(kind))


def store_both(builder: Any, parts: list[Any], address: Any, index: Any) -> None:
    """Round two vectors to bfloat16 and store them as one, where the CPU has that (AVX512_BF16): one write of a line."""
    signature = ir.FunctionType(PAIRS, [VECTOR, VECTOR])
    convert = cgutils.get_or_insert_function(builder.module, signature, "llvm.x86.avx512bf16.cvtne2ps2bf16.512")
    low, high = parts
    builder.store(builder.call(convert, [high, low]), pointer_at(builder, address, index, I16, PAIRS), align=2)


def store_element(builder: Any, value: Any, address: Any, index: Any, kind: int) -> None:
    """One float32, rounded to the kind, ties to even."""
    if kind == F16:
        value = builder.fptrunc(value, ir.HalfType())
    elif kind == BF16:
        bits = builder.bitcast(value, I32)
        odd = builder.and_(builder.lshr(bits, I32(16)), I32(1))
        value = builder.trunc(builder.lshr(builder.add(bits, builder.add(odd, I32(0x7FFF))), I32(16)), I16)
    builder.store(value, pointer_at(builder, address, index, element_type(kind)), align=element_bytes(kind))


def switch(builder: Any, value: Any, count: int, body: Callable[[int], None]) -> None:
    """`body(n)` for value == n in 1..count; other values do nothing."""
    done = builder.append_basic_block("done")
    choice = builder.switch(value, done)
    for n in range(1, count + 1):
        block = builder.append_basic_block(f"case{n}")
        choice.add_case(I64(n), block)
        with builder.goto_block(block):
            body(n)
            builder.branch(done)
    builder.position_at_end(done)


def prefetch(builder: Any, address: Any, start: Any, count: Any, kind: int) -> None:
    """Prefetch `count` elements from `start` on into the second cache, a cache line at a time."""
    line = I64(LINE_BYTES // element_bytes(kind))
    with cgutils.for_range(builder, builder.udiv(builder.add(count, builder.sub(line, I64(1))), line)) as i:
        first = builder.mul(builder.add(start, builder.mul(i.index, line)), I64(element_bytes(kind)))
        _prefetch_at(builder, address, first, SECOND)


def prefetch_line(builder: Any, address: Any, number: Any, where: int = SECOND) -> None:
    """Prefetch the cache line of this number, counted from `address`."""
    _prefetch_at(builder, address, builder.mul(number, I64(LINE_BYTES)), where)


def prefetch_element(builder: Any, address: Any, index: Any, kind: int, where: int = FIRST) -> None:
    """Prefetch the cache line of an element."""
    _prefetch_at(builder, address, builder.mul(index, I64(element_bytes(kind))), where)


def prefetch_written(builder: Any, address: Any, index: Any, kind: int) -> None:
    """Prefetch the cache line of an element that will be written."""
    _prefetch_at(builder, address, builder.mul(index, I64(element_bytes(kind))), FIRST, write=True)


def _prefetch_at(builder: Any, address: Any, offset: Any, where: int, write: bool = False) -> None:
    """The line of a byte. An address that is no memory does no harm."""
    byte = ir.PointerType(BYTE)
    signature = ir.FunctionType(ir.VoidType(), [byte, I32, I32, I32])
    fetch = cgutils.get_or_insert_function(builder.module, signature, "llvm.prefetch.p0")
    builder.call(fetch, [pointer_at(builder, address, offset, BYTE), I32(int(write)), I32(where), I32(1)])


def zeros(builder: Any, count: int) -> list[Any]:
    """`count` zeroed accumulators of 16 lanes; LLVM keeps them in registers."""
    sums = [cgutils.alloca_once(builder, VECTOR) for _ in range(count)]
    for one in sums:
        builder.store(ir.Constant(VECTOR, [0.0] * LANES), one)
    return sums


def put_aside(builder: Any, sums: list[Any]) -> list[Any]:
    """Store sums on the stack, hidden from LLVM, so that they take no registers of the next loop; returns where they are."""
    area = cgutils.alloca_once(builder, ir.ArrayType(VECTOR, len(sums)))
    places = [builder.gep(area, [I32(0), I32(i)]) for i in range(len(sums))]
    for total, place in zip(sums, places, strict=True):
        builder.store(builder.load(total), place)
    hide(builder, places)
    return places


def hide(builder: Any, places: list[Any]) -> None:
    """From here on LLVM takes what was put aside for read and changed."""
    anything = ir.FunctionType(ir.VoidType(), [places[0].type])
    builder.asm(anything, "", "r,~{memory}", [places[0]], side_effect=True)


def add_pairs(builder: Any, total: Any, a: Any, b: Any) -> None:
    """Total += the products of two vectors of 32 bfloat16, each pair's sum into its lane; without AVX512_BF16 one after the other."""
    if not has_bf16_dot():
        for left, right in zip(*(halves(builder, builder.bitcast(v, WORDS)) for v in (a, b)), strict=True):
            add_product(builder, total, left, right)
        return
    signature = ir.FunctionType(VECTOR, [VECTOR, PAIRS, PAIRS])
    dot = cgutils.get_or_insert_function(builder.module, signature, "llvm.x86.avx512bf16.dpbf16ps.512")
    builder.store(builder.call(dot, [builder.load(total), a, b]), total)


def total_of(builder: Any, vector: Any) -> Any:
    """The sum of 16 lanes, halves first."""
    lanes = LANES
    while lanes > 1:
        lanes //= 2
        low, high = (ir.Constant(ir.VectorType(I32, lanes), list(range(start, start + lanes))) for start in (0, lanes))
        vector = builder.fadd(builder.shuffle_vector(vector, vector, low), builder.shuffle_vector(vector, vector, high))
    return builder.extract_element(vector, I32(0))


def greatest_of(builder: Any, vector: Any) -> Any:
    """The greatest of 16 lanes."""
    lanes = LANES
    while lanes > 1:
        lanes //= 2
        low, high = (
            builder.shuffle_vector(
                vector, vector, ir.Constant(ir.VectorType(I32, lanes), list(range(start, start + lanes)))
            )
            for start in (0, lanes)
        )
        vector = builder.select(builder.fcmp_ordered(">", high, low), high, low)
    return builder.extract_element(vector, I32(0))


def multiply_add(builder: Any, a: Any, b: Any, c: Any) -> Any:
    """A * b + c of vectors, rounded once."""
    signature = ir.FunctionType(VECTOR, [VECTOR] * 3)
    fma = cgutils.get_or_insert_function(builder.module, signature, f"llvm.fma.v{LANES}f32")
    return builder.call(fma, [a, b, c])


def add_product(builder: Any, total: Any, a: Any, b: Any) -> None:
    """Total += a * b, rounded once."""
    builder.store(multiply_add(builder, a, b, builder.load(total)), total)


def exponential(builder: Any, x: Any) -> Any:
    """E to the x, for a float32 or a vector of 16: x <= 88; under -87 it is about 1e-38. Within 2 units of the last
    place.

    Cephes' expf: x = n ln 2 + r, a polynomial in r, and n put into the exponent. Branch-free.
    """
    real, lanes = x.type, LANES if x.type == VECTOR else 1
    whole = ir.VectorType(I32, lanes) if lanes > 1 else I32
    suffix = f"v{lanes}f32" if lanes > 1 else "f32"

    def number(value: float) -> Any:
        return ir.Constant(real, [value] * lanes if lanes > 1 else value)

    def integer(value: int) -> Any:
        return ir.Constant(whole, [value] * lanes if lanes > 1 else value)

    multiply_add = cgutils.get_or_insert_function(
        builder.module, ir.FunctionType(real, [real] * 3), f"llvm.fma.{suffix}"
    )
    floor = cgutils.get_or_insert_function(builder.module, ir.FunctionType(real, [real]), f"llvm.floor.{suffix}")

    def fma(a: Any, b: Any, c: Any) -> Any:
        return builder.call(multiply_add, [a, b, c])

    x = builder.select(builder.fcmp_ordered("<", x, number(-87.0)), number(-87.0), x)
    n = builder.call(floor, [fma(x, number(1.44269504088896341), number(0.5))])
    r = fma(n, number(2.12194440e-4), fma(n, number(-0.693359375), x))
    p = number(1.9875691500e-4)
    for coefficient in (1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1):
        p = fma(p, r, number(coefficient))
    p = builder.fadd(fma(builder.fmul(p, r), r, r), number(1.0))
    power = builder.shl(builder.add(builder.fptosi(n, whole), integer(127)), integer(23))
    return builder.fmul(p, builder.bitcast(power, real))


def silu(builder: Any, x: Any) -> Any:
    """X / (1 + e^-x) of a vector; below -87 the denominator is taken at -87, where the quotient is 0 to float32."""
    one = ir.Constant(VECTOR, [1.0] * LANES)
    low = ir.Constant(VECTOR, [-87.0] * LANES)
    bounded = builder.select(builder.fcmp_ordered("<", x, low), low, x)
    return builder.fdiv(x, builder.fadd(one, exponential(builder, builder.fneg(bounded))))
