"""Coded panels of a weight for products in AMX tiles, decoded a step at a time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from engine.cpu.kernels.amx import TILE_ROWS, offset
from engine.cpu.kernels.amx_room import STEP_BYTES
from engine.cpu.kernels.coded import (
    GROUP_INPUTS,
    GROUPS_AHEAD,
    load_group,
    load_kept,
    load_kept_group,
    load_kept_number,
    load_table,
    prefetch_group,
    store_group,
)
from engine.cpu.kernels.emit import FIRST, I64, SECOND

STEP_GROUPS = 2 * TILE_ROWS // GROUP_INPUTS
"""Groups of a coded panel that one step multiplies."""
FAR_GROUPS_AHEAD = 80
"""Groups between a prefetch into the second cache and its use, where memory is read without a pause."""


class Decoder:
    """Emits the decoding of a panel's steps, one after the other. `far`: groups are prefetched long before, into the second cache."""

    def __init__(self, builder: Any, packed: Any, first_group: Any, out: Any, around: Any, far: bool) -> None:
        self._builder, self._packed, self._first, self._out, self._around = builder, packed, first_group, out, around
        self._fetching = (SECOND, FAR_GROUPS_AHEAD) if far else (FIRST, GROUPS_AHEAD)
        self._table, self._kept = load_table(builder, packed), load_kept(builder, packed)
        self._next = cgutils.alloca_once_value(builder, I64(0))
        """The kept group that comes next."""
        self._while_before(first_group, lambda number: None)

    def decode(self, step: Any) -> None:
        """Decode the next step, which is number `step`."""
        builder = self._builder
        begin = builder.add(self._first, builder.mul(step, I64(STEP_GROUPS)))
        slot = offset(builder, self._out, builder.and_(step, self._around), STEP_BYTES)
        for group in range(STEP_GROUPS):
            number = builder.add(begin, I64(group))
            prefetch_group(builder, self._packed, number, *self._fetching)
            store_group(builder, slot, I64(group), load_group(builder, self._packed, self._table, number))

        def put(index: Any) -> None:
            number, steps = load_kept_group(builder, self._kept, index)
            store_group(builder, slot, builder.sub(number, begin), steps)

        self._while_before(builder.add(begin, I64(STEP_GROUPS)), put)

    def _while_before(self, end: Any, use: Callable[[Any], None]) -> None:
        """Use the kept groups that come next and before group `end`."""
        builder = self._builder
        begin = builder.load(self._next)
        with cgutils.for_range(builder, builder.sub(self._kept.count, begin)) as loop:
            index = builder.add(begin, loop.index)
            number = load_kept_number(builder, self._kept, index)
            with builder.if_then(builder.icmp_signed(">=", number, end)):
                loop.do_break()
            use(index)
            builder.store(builder.add(index, I64(1)), self._next)


@intrinsic
def decode_groups(typing_context: Any, out: Any, packed: Any, first: Any, count: Any) -> Any:
    """Out = `count` groups of a coded panel, from number `first` on, as pairs."""

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        out, packed, first, count = args
        table, kept = load_table(builder, packed), load_kept(builder, packed)
        with cgutils.for_range(builder, count) as loop:
            number = builder.add(first, loop.index)
            store_group(builder, out, loop.index, load_group(builder, packed, table, number))
        with cgutils.for_range(builder, kept.count) as loop:
            number, steps = load_kept_group(builder, kept, loop.index)
            place = builder.sub(number, first)
            inside = builder.icmp_unsigned("<", place, count)
            with builder.if_then(inside):
                store_group(builder, out, place, steps)
        return context.get_dummy_value()

    return types.void(*(types.int64,) * 4), emit
