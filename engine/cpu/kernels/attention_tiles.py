"""The two inner loops of paged attention, as Numba intrinsics: query rows by keys, and weights by values.

Addresses are int64, strides count elements, `kind` has to be a compile-time constant. Nothing here checks bounds. Both prefetch
what comes next a few lines at a time, because blocks lie anywhere, where a CPU cannot guess them, and it drops prefetches that come
faster than its memory answers.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from engine.cpu.kernels.emit import (
    DOT_PAIRS,
    F32,
    FIRST,
    FLOAT,
    I16,
    I32,
    I64,
    LANES,
    LINE_BYTES,
    MAX_ROWS,
    ON_ZEN,
    PAIRS,
    SECOND,
    VECTOR,
    WIDE_PAIRS,
    WIDENED,
    WORDS,
    add_pairs,
    add_product,
    broadcast,
    element_bytes,
    load_pairs,
    load_vector,
    pointer_at,
    prefetch_element,
    store_vector,
    switch,
    vectors_at_once,
    zeros,
)

MOST_GROUPS = 4
"""Groups of 16 keys that are multiplied at once at most: few rows need several, or each product would wait for the one before it."""
MAX_VALUE_ROWS = 6
NEXT = SECOND if ON_ZEN else FIRST
"""Where to prefetch the keys and values that come next. On Zen 4 the first cache gets two thirds of the bytes a second that the second one gets,
presumably because it waits for fewer lines at a time.
"""

_SCORES_ARGS = (types.int64,) * 15


@intrinsic(prefer_literal=True)
def scores(
    typing_context: Any,
    rows: Any, out: Any, out_stride: Any, query: Any, dim: Any,
    keys: Any, table: Any, block_stride: Any, padded_size: Any, first: Any, groups: Any,
    values: Any, value_block_stride: Any, value_group: Any, scale: Any, kind: Any, paired: Any,
) -> Any:  # fmt: skip
    """out[r, g * 16 + lane] = query[r] . key * scale, for groups of 16 keys.

    query: [rows, dim] float32, or bfloat16 with DOT_PAIRS; scale: the bits of a float32. keys: blocks of [dim,
    padded_size] elements, in pairs of [dim / 2, padded_size, 2], `block_stride` apart, found through the
    int64 `table`; group g lies at lanes (g % (padded_size / 16)) * 16 of block `table[g // (padded_size / 16)]`.
    With WIDENED keys are float32, not in pairs, and nothing is prefetched.
    out: float32, rows `out_stride` apart, with room for whole fours of groups, group `first` at its start.
    While it computes it prefetches the next keys, and the values of these (`value_group` elements for each group, in blocks
    `value_block_stride` apart), since blocks lie anywhere and the CPU cannot guess the next: a few lines with every component, because
    a CPU drops prefetches that come faster than its memory.
    """
    way = paired.literal_value
    number, in_pairs = F32 if way == WIDENED else kind.literal_value, way in (DOT_PAIRS, WIDE_PAIRS)

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        (rows, out, out_stride, query, dim, keys, table, block_stride, padded_size, first, groups,
         values, value_block_stride, value_group, scale, *_) = args  # fmt: skip
        factor = broadcast(builder, builder.bitcast(builder.trunc(scale, I32), FLOAT))
        per_block = builder.udiv(padded_size, I64(LANES))
        width = I64(2 if in_pairs else 1)

        def places(group: Any) -> tuple[Any, Any]:
            """Where a group's keys and its values begin."""
            absolute = builder.add(first, group)
            block = builder.load(pointer_at(builder, table, builder.udiv(absolute, per_block), I64))
            within = builder.urem(absolute, per_block)
            key = builder.add(builder.mul(block, block_stride), builder.mul(within, builder.mul(width, I64(LANES))))
            return key, builder.add(builder.mul(block, value_block_stride), builder.mul(within, value_group))

        def step(sums: list[Any], starts: list[Any], d: Any, below: Any, count: int) -> None:
            """One component of some times 16 keys, or two components of each side by side."""
            if way == DOT_PAIRS:
                key = [
                    builder.load(pointer_at(builder, keys, builder.add(s, below), I16, PAIRS), align=2) for s in starts
                ]
            elif in_pairs:
                key = [load_pairs(builder, keys, builder.add(s, below)) for s in starts]
            else:
                key = [(load_vector(builder, keys, builder.add(s, below), number),) for s in starts]
            for r in range(count):
                index = builder.add(builder.mul(dim, I64(r)), builder.mul(d, width))
                for g, keys_of_group in enumerate(key):
                    total = sums[len(key) * r + g]
                    if way == DOT_PAIRS:
                        pair = builder.load(pointer_at(builder, query, index, I16, FLOAT), align=2)
                        add_pairs(builder, total, builder.bitcast(broadcast(builder, pair), PAIRS), keys_of_group)
                        continue
                    for half, component in enumerate(keys_of_group):
                        scalar = builder.load(pointer_at(builder, query, builder.add(index, I64(half)), FLOAT))
                        add_product(builder, total, broadcast(builder, scalar), component)

        def tile(count: int) -> None:
            side = vectors_at_once(count)
            steps = builder.udiv(dim, I64(2)) if in_pairs else dim

            def at_once(begin: Any) -> list[tuple[Any, Any]]:
                """The places of the groups from one on; of those after the last, of the first again."""
                groups_here = [builder.add(begin, I64(g)) for g in range(side)]
                fallback = builder.select(builder.icmp_signed("<", begin, groups), begin, I64(0))
                return [places(builder.select(builder.icmp_signed("<", g, groups), g, fallback)) for g in groups_here]

            runs = builder.udiv(builder.add(groups, I64(side - 1)), I64(side))
            with cgutils.for_range(builder, runs) as run:
                begin = builder.mul(run.index, I64(side))
                here, ahead = at_once(begin), at_once(builder.add(begin, I64(side)))
                sums = zeros(builder, side * count)
                with cgutils.for_range(builder, steps) as d:
                    below = builder.mul(builder.mul(d.index, padded_size), width)
                    step(sums, [key for key, _ in here], d.index, below, count)
                    if way != WIDENED:
                        for key, _ in ahead:
                            prefetch_element(builder, keys, builder.add(key, below), number, NEXT)
                        line = builder.mul(d.index, I64(LINE_BYTES // element_bytes(number)))
                        for _, value in here:
                            prefetch_element(builder, values, builder.add(value, line), number, NEXT)
                for r in range(count):
                    for g in range(side):
                        lane = builder.mul(builder.add(begin, I64(g)), I64(LANES))
                        index = builder.add(builder.mul(out_stride, I64(r)), lane)
                        scaled = builder.fmul(builder.load(sums[side * r + g]), factor)
                        store_vector(builder, scaled, out, index, F32)

        switch(builder, rows, MAX_ROWS, tile)
        return context.get_dummy_value()

    return types.void(*_SCORES_ARGS, kind, paired), emit


_VALUES_ARGS = (types.int64,) * 20


@intrinsic(prefer_literal=True)
def weighted_values(
    typing_context: Any,
    rows: Any, vectors: Any, out: Any, out_stride: Any, weights: Any, weights_stride: Any,
    values: Any, table: Any, block_stride: Any, block_size: Any, padded_size: Any, value_stride: Any,
    first: Any, blocks: Any, in_last: Any, goes_on: Any,
    ahead: Any, ahead_table: Any, ahead_stride: Any, ahead_blocks: Any, kind: Any, paired: Any,
) -> Any:  # fmt: skip
    """out[r, :16 * vectors] = sum over keys of weights[r, key] * value[key], for 1 to 6 rows and 1 to `vectors_at_once(rows)` vectors.

    values: blocks of [block_size, value_stride] elements, in pairs of [block_size / 2, value_stride, 2],
    `block_stride` apart, found through the int64 `table` from its entry `first` on; of the last block only the first
    `in_last` keys are read. With WIDENED values are float32, and nothing is prefetched. weights: float32, rows `weights_stride` apart, `padded_size` lanes a block; with DOT_PAIRS
    bfloat16. Where it `goes_on` (1, else 0) the sums begin with those that are in `out`. With each step it prefetches the same places of a block that is read next: `ahead_blocks` of those lie `ahead_stride`
    elements apart from the address `ahead` on, found through `ahead_table`.
    """
    way = paired.literal_value
    number, in_pairs = F32 if way == WIDENED else kind.literal_value, way in (DOT_PAIRS, WIDE_PAIRS)

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        (rows, vectors, out, out_stride, weights, weights_stride, values, table, block_stride, block_size,
         padded_size, value_stride, first, blocks, in_last, goes_on, ahead, ahead_table, ahead_stride, ahead_blocks, *_) = args  # fmt: skip

        def pair_step(
            sums: list[Any], base: Any, next_base: Any, lanes: Any, j: Any, count: int, width: int, half: bool
        ) -> None:
            """Two keys' values side by side; `half`: only the first of them is a key, and what lies beside it may be anything."""
            below = builder.mul(builder.mul(j, value_stride), I64(2))
            row, next_row = builder.add(base, below), builder.add(next_base, below)
            value = []
            for v in range(width):
                prefetch_element(builder, ahead, builder.add(next_row, I64(v * 2 * LANES)), number, NEXT)
                if way != DOT_PAIRS:
                    value.append(load_pairs(builder, values, builder.add(row, I64(v * 2 * LANES)))[: 1 if half else 2])
                    continue
                both = builder.load(
                    pointer_at(builder, values, builder.add(row, I64(v * 2 * LANES)), I16, WORDS), align=2
                )
                if half:
                    both = builder.and_(both, ir.Constant(WORDS, [0xFFFF] * LANES))
                value.append(builder.bitcast(both, PAIRS))
            for r in range(count):
                index = builder.add(builder.mul(weights_stride, I64(r)), builder.add(lanes, builder.mul(j, I64(2))))
                if way != DOT_PAIRS:
                    for key in range(1 if half else 2):
                        scalar = builder.load(pointer_at(builder, weights, builder.add(index, I64(key)), FLOAT))
                        w = broadcast(builder, scalar)
                        for v in range(width):
                            add_product(builder, sums[r * width + v], w, value[v][key])
                    continue
                pair = builder.load(pointer_at(builder, weights, index, I16, FLOAT), align=2)
                w = builder.bitcast(broadcast(builder, pair), PAIRS)
                for v in range(width):
                    add_pairs(builder, sums[r * width + v], w, value[v])

        def step(sums: list[Any], base: Any, next_base: Any, lanes: Any, j: Any, count: int, width: int) -> None:
            """One key's value."""
            below = builder.mul(j, value_stride)
            row, next_row = builder.add(base, below), builder.add(next_base, below)
            if way != WIDENED:
                for v in range(width):
                    prefetch_element(builder, ahead, builder.add(next_row, I64(v * LANES)), number, NEXT)
            value = [load_vector(builder, values, builder.add(row, I64(v * LANES)), number) for v in range(width)]
            for r in range(count):
                index = builder.add(builder.mul(weights_stride, I64(r)), builder.add(lanes, j))
                w = broadcast(builder, builder.load(pointer_at(builder, weights, index, FLOAT)))
                for v in range(width):
                    add_product(builder, sums[r * width + v], w, value[v])

        def places(count: int, width: int) -> list[Any]:
            """Where the sums of rows and vectors lie."""
            return [
                pointer_at(builder, out, builder.add(builder.mul(out_stride, I64(r)), I64(v * LANES)), FLOAT, VECTOR)
                for r in range(count)
                for v in range(width)
            ]

        def tile(count: int, width: int) -> None:
            sums = zeros(builder, count * width)
            with builder.if_then(builder.icmp_signed("!=", goes_on, I64(0))):
                for total, place in zip(sums, places(count, width), strict=True):
                    builder.store(builder.load(place, align=4), total)
            with cgutils.for_range(builder, blocks) as b:
                block = builder.load(pointer_at(builder, table, builder.add(first, b.index), I64))
                base = builder.mul(block, block_stride)
                lanes = builder.mul(b.index, padded_size)
                is_last = builder.icmp_signed("==", builder.add(b.index, I64(1)), blocks)
                here = builder.select(is_last, in_last, block_size)
                more = builder.icmp_signed("<", b.index, ahead_blocks)
                following = builder.load(pointer_at(builder, ahead_table, builder.select(more, b.index, I64(0)), I64))
                next_base = builder.mul(following, ahead_stride)
                if in_pairs:
                    twos = builder.udiv(here, I64(2))
                    with cgutils.for_range(builder, twos) as j:
                        pair_step(sums, base, next_base, lanes, j.index, count, width, half=False)
                    with builder.if_then(builder.icmp_signed("!=", builder.urem(here, I64(2)), I64(0))):
                        pair_step(sums, base, next_base, lanes, twos, count, width, half=True)
                else:
                    with cgutils.for_range(builder, here) as j:
                        step(sums, base, next_base, lanes, j.index, count, width)
            for total, place in zip(sums, places(count, width), strict=True):
                builder.store(builder.load(total), place, align=4)

        def by_width(count: int) -> None:
            switch(builder, vectors, vectors_at_once(count), lambda width: tile(count, width))

        switch(builder, rows, MAX_VALUE_ROWS, by_width)
        return context.get_dummy_value()

    return types.void(*_VALUES_ARGS, kind, paired), emit
