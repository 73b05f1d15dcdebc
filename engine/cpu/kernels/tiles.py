"""The inner loop of products, as a Numba intrinsic: tiles of rows by panels of a weight, whose sums stay in registers.

Addresses are int64, strides count elements, `kind` has to be a compile-time constant. Nothing here checks bounds.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from engine.cpu.kernels.coded import (
    GROUP_BYTES,
    GROUP_INPUTS,
    load_group,
    load_kept,
    load_kept_group,
    load_kept_number,
    load_table,
    prefetch_group,
    store_group,
)
from engine.cpu.kernels.emit import (
    BF16,
    DOT_PAIRS,
    F32,
    FIRST,
    FLOAT,
    I16,
    I64,
    LANES,
    LINE_BYTES,
    MAX_ROWS,
    PAIRS,
    PASSING,
    WIDE_PAIRS,
    WIDENED,
    add_pairs,
    add_product,
    broadcast,
    element_bytes,
    element_type,
    halves,
    has_avx512,
    has_bf16_dot,
    hide,
    load_vector,
    load_words,
    pairing,
    pointer_at,
    prefetch_element,
    prefetch_line,
    prefetch_written,
    put_aside,
    silu,
    store_both,
    store_vector,
    switch,
    vectors_at_once,
    widen,
    zeros,
)

PRODUCT_ROWS = MAX_ROWS if has_avx512() else 12
"""Rows of one tile of a product. Where registers do not hold all sums, rows and vectors take turns."""
MAX_CODED_ROWS = 11
"""The same of a tile that decodes its panel, which takes some registers."""
KEEPING_ROWS = 10 if pairing() == WIDE_PAIRS else 8
"""Rows of a tile that decodes its panel for the others too, which takes more of them. Of 32 rows it leaves two full tiles."""
PANEL = 2 * LANES
"""Columns of a weight that lie together: two vectors."""

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


def fetch_output(builder: Any, rows: int, out: Any, out_stride: Any, kind: int, ending: int) -> None:
    """Prefetch what `end_row` will write of some rows: a result of many rows is in no near cache, and writes would wait for its lines."""
    stored = F32 if ending in (ADD, WIDEN) else kind
    columns, each = LANES if ending == GATE else PANEL, LINE_BYTES // element_bytes(stored)
    for r, column in itertools.product(range(rows), range(0, columns, each)):
        index = builder.add(builder.mul(out_stride, I64(r)), I64(column))
        prefetch_written(builder, out, index, stored)


GROUP_LINES = GROUP_BYTES // LINE_BYTES
Sums = list[Any] | dict[int, Any]
"""Accumulators of rows and vectors: that of row r and vector v is number 2 * r + v."""
_PRODUCT_ARGS = (types.int64,) * 16
RUN = 16
"""Steps of the sum between two runs of prefetches, a line for each step. Among the steps they would take registers that the
addresses of 12 rows need.
"""
STEPS_AHEAD = 32
"""What a step prefetches of its own panel is read so many steps later."""
STRETCH = 128
"""Steps of the sum in a stretch: where rows take turns, each goes over a stretch of the panel while it lies in the first cache."""
STRETCH_AHEAD = 8 << 10
"""What rows that take turns prefetch of their own panel is read so many bytes later: half a stretch of float32."""
ONCE = -1
"""In place of the address of what is prefetched: no other tile of rows reads the panel, so that no cache keeps it. Else weights would
drive all that the host needs between two kernels out of the caches.
"""
SURELY_ONCE = MAX_ROWS // 3
"""Tiles of so few rows are the only or the last ones of their panel, and go over it once."""


@intrinsic
def widen_pairs(typing_context: Any, out: Any, source: Any, pairs: Any, width: Any) -> Any:
    """Pairs of bfloat16 [pairs, width, 2] as float32 numbers [2 * pairs, width] at `out`; the width is a multiple of 16."""

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        out, source, pairs, width = args
        with cgutils.for_range(builder, pairs) as i:
            base = builder.mul(i.index, builder.mul(width, I64(2)))
            with cgutils.for_range(builder, builder.udiv(width, I64(LANES))) as v:
                first = builder.mul(v.index, I64(LANES))
                words = load_words(builder, source, builder.add(base, builder.mul(first, I64(2))))
                for half, numbers in enumerate(halves(builder, words)):
                    index = builder.add(builder.add(base, builder.mul(width, I64(half))), first)
                    store_vector(builder, numbers, out, index, F32)
        return context.get_dummy_value()

    return types.void(*(types.int64,) * 4), emit


@intrinsic(prefer_literal=True)
def product(
    typing_context: Any,
    rows: Any, out: Any, out_stride: Any, x: Any, x_stride: Any, panel: Any, first: Any, last: Any, start: Any, start_stride: Any,
    into: Any, factors: Any, column: Any, ahead: Any, decoded: Any, first_kept: Any,
    kind: Any, paired: Any, coded: Any, ending: Any,
) -> Any:  # fmt: skip
    """out[r, :32] = sum over i of x[r, i] * panel[i, :32], for at most PRODUCT_ROWS rows; `ending` says what follows.

    The inputs i are those from `first` to `last`: a part of the sum, unless they are all. Parts begin at multiples of 4. A part whose sums
    are to go on is stored into[r, :32], float32 without gaps, instead of ending (0: it ends).
    The sum begins at start[r, :32] (float32; 0: at zero; rows `start_stride` apart, so a bias has stride 0). x and out
    are of `kind`, but for ADD and WIDEN, and but for x in float32 with WIDE_PAIRS and WIDENED. factors (0: none): an int64 a row, 0 or the address of float32 factors by
    which the sums are multiplied, of which those from `column` on belong to this panel. panel: [inner, 32], with
    WIDENED in float32, or with DOT_PAIRS and WIDE_PAIRS [inner / 2, 32, 2] bfloat16, two steps of the sum side by side, as AVX512_BF16's dot product wants them, and
    where `coded`, a compile-time constant too, such pairs as `coded.encode` codes them.
    decoded: where a tile of KEEPING_ROWS puts the pairs of a coded panel, as if all were put there (0: nowhere).
    ahead: an address from which on it prefetches half as many bytes as the part has, into the second cache (0: none), or ONCE.
    first_kept: the number of kept groups of a coded panel before the part; it returns the number of those before the next part.
    The order of the sum is that of i, whatever the rows.
    """
    number, way, then = kind.literal_value, paired.literal_value, ending.literal_value
    in_pairs, in_code = way in (DOT_PAIRS, WIDE_PAIRS), bool(coded.literal_value)
    source = F32 if way == WIDENED else number
    in_panel = F32 if in_pairs else source  # a pair takes as much room

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        rows, out, out_stride, x, x_stride, panel, first, last, start, start_stride, into, *more = args
        factors, column, ahead, decoded, first_kept, *_ = more
        each_step = GROUP_INPUTS if in_code else 2 if in_pairs else 1
        first_step, last_step = builder.udiv(first, I64(each_step)), builder.udiv(last, I64(each_step))
        kept_after = cgutils.alloca_once_value(builder, first_kept)

        def add_words(sums: Sums, words: dict[int, Any], i: Any, these: range) -> None:
            """The products with a pair of inputs, number `i`; `words` are the pairs of the panel's vectors."""
            split = {v: halves(builder, word) for v, word in words.items()} if way == WIDE_PAIRS else {}
            if way == WIDE_PAIRS:  # one after the other, as if they did not lie side by side
                for half, r in itertools.product(range(2), these):
                    index = builder.add(builder.mul(x_stride, I64(r)), builder.mul(i, I64(2)))
                    scalar = builder.load(pointer_at(builder, x, builder.add(index, I64(half)), FLOAT), align=4)
                    factor = broadcast(builder, scalar)
                    for v in split:
                        add_product(builder, sums[2 * r + v], factor, split[v][half])
                return
            for r in these:
                index = builder.add(builder.mul(x_stride, I64(r)), builder.mul(i, I64(2)))
                pair = builder.load(pointer_at(builder, x, index, I16, FLOAT), align=2)
                factor = builder.bitcast(broadcast(builder, pair), PAIRS)
                for v, word in words.items():
                    add_pairs(builder, sums[2 * r + v], factor, builder.bitcast(word, PAIRS))

        def fetching_step(sums: list[Any], i: Any, count: int, where: int) -> None:
            base = builder.mul(i, I64(PANEL))
            for line in range(0, PANEL, LINE_BYTES // element_bytes(in_panel)):
                prefetch_element(builder, panel, builder.add(base, I64(line + STEPS_AHEAD * PANEL)), in_panel, where)
            step(sums, range(2), i, range(count))

        def step(sums: Sums, vectors: Sequence[int], i: Any, these: range) -> None:
            base = builder.mul(i, I64(PANEL))
            places = {v: builder.add(base, I64(v * LANES)) for v in vectors}
            if in_pairs:
                words = {v: load_words(builder, panel, builder.mul(place, I64(2))) for v, place in places.items()}
                add_words(sums, words, i, these)
                return
            columns = {v: load_vector(builder, panel, place, source) for v, place in places.items()}
            for r in these:
                index = builder.add(builder.mul(x_stride, I64(r)), i)
                pointer = pointer_at(builder, x, index, element_type(source))
                scalar = widen(builder, builder.load(pointer, align=element_bytes(source)), source, 1)
                factor = broadcast(builder, scalar)
                for v, column_of in columns.items():
                    add_product(builder, sums[2 * r + v], factor, column_of)

        def in_runs(begin: Any, end: Any, size: int, lines: int, each: Callable[[Any], None]) -> Any:
            """Whole runs of so many of the steps or groups from `begin` to `end`; where they end. Each run prefetches so many lines."""
            runs = builder.udiv(builder.sub(end, begin), I64(size))
            with cgutils.for_range(builder, runs) as run:
                first = builder.add(begin, builder.mul(run.index, I64(size)))
                with builder.if_then(builder.icmp_signed("!=", ahead, I64(0))):
                    line = builder.mul(builder.udiv(builder.sub(first, first_step), I64(size)), I64(lines))
                    for number in range(lines):
                        prefetch_line(builder, ahead, builder.add(line, I64(number)))
                with cgutils.for_range(builder, I64(size)) as i:
                    each(builder.add(first, i.index))
            return builder.add(begin, builder.mul(runs, I64(size)))

        def coded_steps(sums: list[Any], count: int, where: int, many: bool, keep: bool = False) -> None:
            """All steps of a coded panel: stretches of groups, between them those that are kept as they are."""
            table, kept = load_table(builder, panel), load_kept(builder, panel)
            done, index = (cgutils.alloca_once_value(builder, value) for value in (first_step, first_kept))
            stretches, after_one, after_all = (builder.append_basic_block(name) for name in ("stretch", "kept", "end"))

            def multiply(number: Any, steps: list[list[Any]]) -> None:
                if keep:
                    store_group(builder, decoded, number, steps)
                for s, words in enumerate(steps):
                    add_words(
                        sums, dict(enumerate(words)), builder.add(builder.mul(number, I64(2)), I64(s)), range(count)
                    )

            def group(number: Any) -> None:
                prefetch_group(builder, panel, number, where)
                multiply(number, load_group(builder, panel, table, number))

            def stretch(end: Any) -> None:
                begin = builder.load(done)
                if many:
                    begin = in_runs(begin, end, RUN // 2, RUN // 2 * GROUP_LINES // 2, group)
                with cgutils.for_range_slice(builder, begin, end, I64(1)) as (number, _):
                    group(number)

            builder.branch(stretches)
            builder.position_at_end(stretches)
            number = cgutils.alloca_once_value(builder, last_step)
            with builder.if_then(builder.icmp_signed("<", builder.load(index), kept.count)):
                builder.store(load_kept_number(builder, kept, builder.load(index)), number)
            in_part = builder.icmp_signed("<", builder.load(number), last_step)
            stretch(builder.select(in_part, builder.load(number), last_step))
            builder.cbranch(in_part, after_one, after_all)
            builder.position_at_end(after_one)
            this, steps = load_kept_group(builder, kept, builder.load(index))
            multiply(this, steps)
            builder.store(builder.add(this, I64(1)), done)
            builder.store(builder.add(builder.load(index), I64(1)), index)
            builder.branch(stretches)
            builder.position_at_end(after_all)
            builder.store(builder.load(index), kept_after)

        def all_steps(sums: list[Any], count: int, where: int, more_tiles: bool) -> None:
            many = more_tiles and way != WIDE_PAIRS and 2 * count > MAX_ROWS  # fewer rows have no second tile
            if in_code:
                coded_steps(sums, count, where, many)
                return
            done = first_step
            if many:
                done = in_runs(done, last_step, RUN, RUN, lambda i: fetching_step(sums, i, count, where))
            with cgutils.for_range_slice(builder, done, last_step, I64(1)) as (i, _):
                fetching_step(sums, i, count, where)

        def steps_once_or_again(sums: list[Any], count: int) -> None:
            if count <= SURELY_ONCE or (way == WIDE_PAIRS and PASSING == FIRST):  # or both ways are the same
                all_steps(sums, count, PASSING, more_tiles=False)
                return
            with builder.if_else(builder.icmp_signed("==", ahead, I64(ONCE))) as (once, again):
                with once:
                    all_steps(sums, count, PASSING, more_tiles=False)
                with again:
                    all_steps(sums, count, FIRST, more_tiles=True)

        def scale(sums: list[Any], address: Any) -> None:
            with builder.if_then(builder.icmp_signed("!=", address, I64(0))):
                for v, total in enumerate(sums):
                    factor = load_vector(builder, address, builder.add(column, I64(v * LANES)), F32)
                    builder.store(builder.fmul(builder.load(total), factor), total)

        def begin(sums: list[Any], count: int) -> None:
            with builder.if_then(builder.icmp_signed("!=", start, I64(0))):
                for r in range(count):
                    for v in range(2):
                        index = builder.add(builder.mul(start_stride, I64(r)), I64(v * LANES))
                        builder.store(load_vector(builder, start, index, F32), sums[2 * r + v])

        def add_up(sums: list[Any], count: int) -> None:
            if in_code and count == KEEPING_ROWS:
                with builder.if_else(builder.icmp_signed("!=", decoded, I64(0))) as (for_others, alone):
                    with for_others:
                        coded_steps(sums, count, FIRST, many=False, keep=True)
                    with alone:
                        steps_once_or_again(sums, count)
            else:
                steps_once_or_again(sums, count)

        def add_up_by_turns(sums: list[Any], count: int) -> None:
            """With `sums` that were put aside. The panel goes through the first cache a stretch at a time, and what is prefetched is
            spread evenly over all steps: memory rests less than if each vector read its half of the panel by itself.
            """
            groups = -(-count // MAX_ROWS)
            turns = [
                (range(g * count // groups, (g + 1) * count // groups), v) for g in range(groups) for v in range(2)
            ]
            own = builder.or_(builder.icmp_signed("==", ahead, I64(0)), builder.icmp_signed("==", ahead, I64(ONCE)))
            share = PANEL * element_bytes(in_panel) // len(turns)  # bytes a step
            each = builder.select(own, I64(share), I64(share // 2))
            here = builder.add(panel, builder.mul(first_step, I64(PANEL * element_bytes(in_panel))))
            fetched = builder.select(own, builder.add(here, I64(STRETCH_AHEAD)), ahead)
            steps = builder.sub(last_step, first_step)
            with cgutils.for_range(
                builder, builder.udiv(builder.add(steps, I64(STRETCH - 1)), I64(STRETCH))
            ) as stretch:
                before = builder.mul(stretch.index, I64(STRETCH))
                first = builder.add(first_step, before)
                full = builder.add(first, I64(STRETCH))
                end = builder.select(builder.icmp_signed("<", full, last_step), full, last_step)
                for turn, (these, v) in enumerate(turns):
                    done = builder.add(
                        builder.mul(before, I64(len(turns))), builder.mul(builder.sub(end, first), I64(turn))
                    )
                    place = cgutils.alloca_once_value(builder, builder.add(fetched, builder.mul(done, each)))
                    held = {2 * r + v: cgutils.alloca_once_value(builder, builder.load(sums[2 * r + v])) for r in these}
                    with cgutils.for_range_slice(builder, first, end, I64(1)) as (i, _):
                        there = builder.load(place)
                        prefetch_line(builder, there, I64(0), FIRST)
                        builder.store(builder.add(there, each), place)
                        step(held, [v], i, these)
                    for at, total in held.items():
                        builder.store(builder.load(total), sums[at])
                hide(builder, sums)

        def tile(count: int) -> None:
            if count > SURELY_ONCE:
                with builder.if_then(builder.icmp_signed("==", into, I64(0))):
                    fetch_output(builder, count, out, out_stride, number, then)
            sums = zeros(builder, 2 * count)
            begin(sums, count)
            if vectors_at_once(count) >= 2:
                add_up(sums, count)
            else:
                sums = put_aside(builder, sums)
                add_up_by_turns(sums, count)
            with builder.if_else(builder.icmp_signed("!=", into, I64(0)), likely=False) as (goes_on, ends):
                with goes_on:
                    for place, total in enumerate(sums):
                        store_vector(builder, builder.load(total), into, I64(LANES * place), F32)
                with ends:
                    end_rows(sums, count)

        def end_rows(sums: list[Any], count: int) -> None:
            with builder.if_then(builder.icmp_signed("!=", factors, I64(0)), likely=False):
                for r in range(count):
                    scale(sums[2 * r : 2 * r + 2], builder.load(pointer_at(builder, factors, I64(r), I64)))
            for r in range(count):
                parts = [builder.load(sums[2 * r]), builder.load(sums[2 * r + 1])]
                end_row(builder, parts, out, builder.mul(out_stride, I64(r)), number, then)

        switch(builder, rows, MAX_CODED_ROWS if in_code else PRODUCT_ROWS, tile)
        return builder.load(kept_after)

    return types.int64(*_PRODUCT_ARGS, kind, paired, coded, ending), emit
