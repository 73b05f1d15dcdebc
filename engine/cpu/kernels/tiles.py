"""The three inner loops, as Numba intrinsics: tiles of rows by vectors whose sums stay in registers.

Addresses are int64, strides count elements, `kind` has to be a compile-time constant. Nothing here checks bounds.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from engine.cpu.kernels.emit import (
    BF16,
    F32,
    FLOAT,
    I16,
    I32,
    I64,
    LANES,
    PAIRS,
    VECTOR,
    add_pairs,
    add_product,
    broadcast,
    element_bytes,
    element_type,
    has_bf16_dot,
    load_vector,
    pointer_at,
    prefetch,
    prefetch_line,
    silu,
    store_both,
    store_vector,
    switch,
    widen,
    zeros,
)

MAX_ROWS = 12
"""Rows of one tile: with two vectors each their sums fill 24 of the 32 AVX-512 registers."""
MAX_VALUE_ROWS, MAX_VALUE_VECTORS = 6, 4
WORDS = ir.VectorType(I32, LANES)
PANEL = 2 * LANES
"""Columns of a weight that lie together; with MAX_ROWS rows a tile of sums fills 24 registers."""

_SCORES_ARGS = (types.int64,) * 15


@intrinsic(prefer_literal=True)
def scores(
    typing_context: Any,
    rows: Any, out: Any, out_stride: Any, query: Any, dim: Any,
    keys: Any, table: Any, block_stride: Any, padded_size: Any, first: Any, groups: Any,
    values: Any, value_block_stride: Any, value_block: Any, scale: Any, kind: Any, paired: Any,
) -> Any:  # fmt: skip
    """out[r, g * 16 + lane] = query[r] . key * scale, for groups of 16 keys; an odd last group is computed twice.

    query: [rows, dim] float32, or bfloat16 where `paired`; scale: the bits of a float32. keys: blocks of [dim,
    padded_size] elements, where `paired` of [dim / 2, padded_size, 2], `block_stride` apart, found through the
    int64 `table`; group g lies at lanes (g % (padded_size / 16)) * 16 of block `table[g // (padded_size / 16)]`.
    out: float32, rows `out_stride` apart, with room for an even number of groups, group `first` at its start.
    While it computes it prefetches the next keys, and the same blocks of the values (`value_block` elements of every
    `value_block_stride`), since blocks lie anywhere and the CPU cannot guess the next.
    """
    number, in_pairs = kind.literal_value, bool(paired.literal_value)

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        (rows, out, out_stride, query, dim, keys, table, block_stride, padded_size, first, groups,
         values, value_block_stride, value_block, scale, *_) = args  # fmt: skip
        factor = broadcast(builder, builder.bitcast(builder.trunc(scale, I32), FLOAT))
        per_block = builder.udiv(padded_size, I64(LANES))
        pairs = builder.udiv(builder.add(groups, I64(1)), I64(2))

        def block_of(absolute: Any) -> Any:
            return builder.load(pointer_at(builder, table, builder.udiv(absolute, per_block), I64))

        def start(group: Any) -> Any:
            absolute = builder.add(first, group)
            block = block_of(absolute)
            lane = builder.mul(builder.urem(absolute, per_block), I64(LANES))
            return builder.add(builder.mul(block, block_stride), builder.mul(lane, I64(2 if in_pairs else 1)))

        def step(sums: list[Any], starts: list[Any], d: Any, count: int) -> None:
            """One component of 2 times 16 keys, or two components of each side by side."""
            width = I64(2 if in_pairs else 1)
            below = builder.mul(builder.mul(d, padded_size), width)
            if in_pairs:
                key = [
                    builder.load(pointer_at(builder, keys, builder.add(s, below), I16, PAIRS), align=2) for s in starts
                ]
            else:
                key = [load_vector(builder, keys, builder.add(s, below), number) for s in starts]
            for r in range(count):
                index = builder.add(builder.mul(dim, I64(r)), builder.mul(d, width))
                for half in range(2):
                    total = sums[2 * r + half]
                    if in_pairs:
                        pair = builder.load(pointer_at(builder, query, index, I16, FLOAT), align=2)
                        add_pairs(builder, total, builder.bitcast(broadcast(builder, pair), PAIRS), key[half])
                    else:
                        scalar = builder.load(pointer_at(builder, query, index, FLOAT))
                        add_product(builder, total, broadcast(builder, scalar), key[half])

        def tile(count: int) -> None:
            steps = builder.udiv(dim, I64(2)) if in_pairs else dim
            with cgutils.for_range(builder, pairs) as pair:
                group = builder.mul(pair.index, I64(2))
                following = builder.add(group, I64(1))
                last = builder.icmp_signed("<", following, groups)
                starts = [start(group), start(builder.select(last, following, group))]
                ahead = builder.add(group, I64(2))
                ahead = start(builder.select(builder.icmp_signed("<", ahead, groups), ahead, group))
                prefetch(builder, keys, ahead, builder.mul(dim, padded_size), number)
                for one in (group, following):
                    with builder.if_then(builder.icmp_signed("<", one, groups)):
                        block = block_of(builder.add(first, one))
                        prefetch(builder, values, builder.mul(block, value_block_stride), value_block, number)
                sums = zeros(builder, 2 * count)
                with cgutils.for_range(builder, steps) as d:
                    step(sums, starts, d.index, count)
                for r in range(count):
                    for half in range(2):
                        lane = builder.add(builder.mul(group, I64(LANES)), I64(half * LANES))
                        index = builder.add(builder.mul(out_stride, I64(r)), lane)
                        scaled = builder.fmul(builder.load(sums[2 * r + half]), factor)
                        store_vector(builder, scaled, out, index, F32)

        switch(builder, rows, MAX_ROWS, tile)
        return context.get_dummy_value()

    return types.void(*_SCORES_ARGS, kind, paired), emit


_VALUES_ARGS = (types.int64,) * 15


@intrinsic(prefer_literal=True)
def weighted_values(
    typing_context: Any,
    rows: Any, vectors: Any, out: Any, out_stride: Any, weights: Any, weights_stride: Any,
    values: Any, table: Any, block_stride: Any, block_size: Any, padded_size: Any, value_stride: Any,
    first: Any, blocks: Any, in_last: Any, kind: Any, paired: Any,
) -> Any:  # fmt: skip
    """out[r, :16 * vectors] = sum over keys of weights[r, key] * value[key].

    values: blocks of [block_size, value_stride] elements, where `paired` of [block_size / 2, value_stride, 2],
    `block_stride` apart, found through the int64 `table` from its entry `first` on; of the last block only the first
    `in_last` keys are read. weights: float32, rows `weights_stride` apart, `padded_size` lanes a block; where `paired`
    bfloat16.
    """
    number, in_pairs = kind.literal_value, bool(paired.literal_value)

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        (rows, vectors, out, out_stride, weights, weights_stride, values, table, block_stride, block_size,
         padded_size, value_stride, first, blocks, in_last, *_) = args  # fmt: skip

        def pair_step(sums: list[Any], base: Any, lanes: Any, j: Any, count: int, width: int, half: bool) -> None:
            """Two keys' values side by side; `half`: only the first of them is a key."""
            row = builder.add(base, builder.mul(builder.mul(j, value_stride), I64(2)))
            value = []
            for v in range(width):
                both = builder.load(
                    pointer_at(builder, values, builder.add(row, I64(v * 2 * LANES)), I16, WORDS), align=2
                )
                if half:
                    both = builder.and_(both, ir.Constant(WORDS, [0xFFFF] * LANES))
                value.append(builder.bitcast(both, PAIRS))
            for r in range(count):
                index = builder.add(builder.mul(weights_stride, I64(r)), builder.add(lanes, builder.mul(j, I64(2))))
                pair = builder.load(pointer_at(builder, weights, index, I16, FLOAT), align=2)
                w = builder.bitcast(broadcast(builder, pair), PAIRS)
                for v in range(width):
                    add_pairs(builder, sums[r * width + v], w, value[v])

        def step(sums: list[Any], base: Any, lanes: Any, j: Any, count: int, width: int) -> None:
            """One key's value."""
            row = builder.add(base, builder.mul(j, value_stride))
            value = [load_vector(builder, values, builder.add(row, I64(v * LANES)), number) for v in range(width)]
            for r in range(count):
                index = builder.add(builder.mul(weights_stride, I64(r)), builder.add(lanes, j))
                w = broadcast(builder, builder.load(pointer_at(builder, weights, index, FLOAT)))
                for v in range(width):
                    add_product(builder, sums[r * width + v], w, value[v])

        def tile(count: int, width: int) -> None:
            sums = zeros(builder, count * width)
            with cgutils.for_range(builder, blocks) as b:
                block = builder.load(pointer_at(builder, table, builder.add(first, b.index), I64))
                base = builder.mul(block, block_stride)
                lanes = builder.mul(b.index, padded_size)
                is_last = builder.icmp_signed("==", builder.add(b.index, I64(1)), blocks)
                here = builder.select(is_last, in_last, block_size)
                if in_pairs:
                    twos = builder.udiv(here, I64(2))
                    with cgutils.for_range(builder, twos) as j:
                        pair_step(sums, base, lanes, j.index, count, width, half=False)
                    with builder.if_then(builder.icmp_signed("!=", builder.urem(here, I64(2)), I64(0))):
                        pair_step(sums, base, lanes, twos, count, width, half=True)
                else:
                    with cgutils.for_range(builder, here) as j:
                        step(sums, base, lanes, j.index, count, width)
            for r in range(count):
                for v in range(width):
                    index = builder.add(builder.mul(out_stride, I64(r)), I64(v * LANES))
                    builder.store(
                        builder.load(sums[r * width + v]), pointer_at(builder, out, index, FLOAT, VECTOR), align=4
                    )

        def by_width(count: int) -> None:
            switch(builder, vectors, MAX_VALUE_VECTORS, lambda width: tile(count, width))

        switch(builder, rows, MAX_VALUE_ROWS, by_width)
        return context.get_dummy_value()

    return types.void(*_VALUES_ARGS, kind, paired), emit


STORE, ADD, GATE, WIDEN = 0, 1, 2, 3
"""The epilogues of a product. STORE: store it; ADD: add it to a float32 output; GATE: its halves are the gate and the
up columns of a gated layer, store silu(gate) * up; WIDEN: store it in float32.
"""


def end_row(builder: Any, parts: list[Any], out: Any, first: Any, kind: int, ending: int) -> None:
    """The epilogue of a product: store, add, gate or widen the two accumulators of a row at `out[first]`."""
    if ending == GATE:
        store_vector(builder, builder.fmul(silu(builder, parts[0]), parts[1]), out, first, kind)
        return
    if ending == STORE and kind == BF16 and has_bf16_dot():
        store_both(builder, parts, out, first)
        return
    for v, part in enumerate(parts):
        index = builder.add(first, I64(v * LANES))
        if ending == ADD:
            part = builder.fadd(part, load_vector(builder, out, index, F32))
        store_vector(builder, part, out, index, F32 if ending in (ADD, WIDEN) else kind)


_PRODUCT_ARGS = (types.int64,) * 12
RUN = 16
"""Steps of the sum between two runs of prefetches, a line for each step. Among the steps they would take registers that the
addresses of 12 rows need.
"""


@intrinsic(prefer_literal=True)
def product(
    typing_context: Any,
    rows: Any, out: Any, out_stride: Any, x: Any, x_stride: Any, panel: Any, inner: Any, start: Any, start_stride: Any,
    factors: Any, column: Any, ahead: Any,
    kind: Any, paired: Any, ending: Any,
) -> Any:  # fmt: skip
    """out[r, :32] = sum over i of x[r, i] * panel[i, :32], for at most 12 rows; `ending` says what follows.

    The sum begins at start[r, :32] (float32; 0: at zero; rows `start_stride` apart, so a bias has stride 0). x and out
    are of `kind`, but for ADD and WIDEN. factors (0: none): an int64 a row, 0 or the address of float32 factors by
    which the sums are multiplied, of which those from `column` on belong to this panel. panel: [inner, 32], or where
    `paired` [inner / 2, 32, 2] bfloat16, two steps of the sum side by side, as AVX512_BF16's dot product wants them.
    ahead: an address from which on it prefetches half as many bytes as the panel has, into the second cache (0: none).
    The order of the sum is that of i, whatever the rows.
    """
    number, in_pairs, then = kind.literal_value, bool(paired.literal_value), ending.literal_value

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        rows, out, out_stride, x, x_stride, panel, inner, start, start_stride, factors, column, ahead, *_ = args

        def step(sums: list[Any], i: Any, count: int) -> None:
            base = builder.mul(i, I64(PANEL))
            if in_pairs:
                columns = [
                    builder.load(pointer_at(builder, panel, builder.add(base, I64(v * LANES)), I32, PAIRS), align=4)
                    for v in range(2)
                ]
            else:
                columns = [load_vector(builder, panel, builder.add(base, I64(v * LANES)), number) for v in range(2)]
            for r in range(count):
                index = builder.mul(x_stride, I64(r))
                if in_pairs:
                    index = builder.add(index, builder.mul(i, I64(2)))
                    pair = builder.load(pointer_at(builder, x, index, I16, FLOAT), align=2)
                    factor = builder.bitcast(broadcast(builder, pair), PAIRS)
                else:
                    pointer = pointer_at(builder, x, builder.add(index, i), element_type(number))
                    scalar = widen(builder, builder.load(pointer, align=element_bytes(number)), number, 1)
                    factor = broadcast(builder, scalar)
                for v in range(2):
                    total = sums[2 * r + v]
                    if in_pairs:
                        add_pairs(builder, total, factor, columns[v])
                    else:
                        add_product(builder, total, factor, columns[v])

        def in_runs(sums: list[Any], steps: Any, count: int) -> Any:
            """The steps of whole runs; their number."""
            runs = builder.udiv(steps, I64(RUN))
            with cgutils.for_range(builder, runs) as run:
                begin = builder.mul(run.index, I64(RUN))
                with builder.if_then(builder.icmp_signed("!=", ahead, I64(0))):
                    for line in range(RUN):
                        prefetch_line(builder, ahead, builder.add(begin, I64(line)))
                with cgutils.for_range(builder, I64(RUN)) as i:
                    step(sums, builder.add(begin, i.index), count)
            return builder.mul(runs, I64(RUN))

        def scale(sums: list[Any], address: Any) -> None:
            with builder.if_then(builder.icmp_signed("!=", address, I64(0))):
                for v, total in enumerate(sums):
                    factor = load_vector(builder, address, builder.add(column, I64(v * LANES)), F32)
                    builder.store(builder.fmul(builder.load(total), factor), total)

        def tile(count: int) -> None:
            sums = zeros(builder, 2 * count)
            with builder.if_then(builder.icmp_signed("!=", start, I64(0))):
                for r in range(count):
                    for v in range(2):
                        index = builder.add(builder.mul(start_stride, I64(r)), I64(v * LANES))
                        builder.store(load_vector(builder, start, index, F32), sums[2 * r + v])
            steps = builder.udiv(inner, I64(2)) if in_pairs else inner
            done = I64(0)
            if 2 * count > MAX_ROWS:  # fewer rows have no second tile
                done = in_runs(sums, steps, count)
            with cgutils.for_range(builder, builder.sub(steps, done)) as i:
                step(sums, builder.add(done, i.index), count)
            with builder.if_then(builder.icmp_signed("!=", factors, I64(0)), likely=False):
                for r in range(count):
                    scale(sums[2 * r : 2 * r + 2], builder.load(pointer_at(builder, factors, I64(r), I64)))
            for r in range(count):
                parts = [builder.load(sums[2 * r]), builder.load(sums[2 * r + 1])]
                end_row(builder, parts, out, builder.mul(out_stride, I64(r)), number, then)

        switch(builder, rows, MAX_ROWS, tile)
        return context.get_dummy_value()

    return types.void(*_PRODUCT_ARGS, kind, paired, ending), emit
