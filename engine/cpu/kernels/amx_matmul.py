"""x W^T + b in AMX tiles: who multiplies which blocks, and in which order, for one row or thousands.

Few rows are one block, and the weight is read straight through memory. Many rows are blocks of 48, which pass one after the other by a part of a
panel that stays in a core's first cache, while the part that probably comes next is prefetched into the second.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

from engine.cpu.kernels.amx import LINE, TILE_ROWS
from engine.cpu.kernels.amx_decode import STEP_GROUPS, decode_groups
from engine.cpu.kernels.amx_low_rank import BEGIN_ROOM, begin_block
from engine.cpu.kernels.amx_product import (
    FIRST_BLOCK,
    LATER_BLOCK,
    ONLY_BLOCK,
    multiply_block,
    release_tiles,
    shape_tiles,
)
from engine.cpu.kernels.amx_room import (
    BLOCK_ROWS,
    COLUMN_SCALES,
    END,
    NEXT,
    OUT,
    ROW_BYTES,
    SCALES,
    START,
    STEP_BYTES,
    STRIDE,
    add_pairs_left,
    end_block,
    make_room,
    scale_rows,
)
from engine.cpu.kernels.coded import GROUP_BYTES, HEAD_BYTES
from engine.cpu.kernels.compiled import inlined, kernel
from engine.cpu.kernels.emit import F32, LANES
from engine.cpu.kernels.lora import SEGMENT_BYTES
from engine.cpu.kernels.matmul import PIECE_BYTES, PIECES, bytes_of_panel
from engine.cpu.kernels.simd import address_of, load_int, reserve, store_int, take_ticket
from engine.cpu.kernels.tiles import ADD, GATE, PANEL, WIDEN

RING_STEPS = 4
"""Decoded steps of a coded panel that a worker keeps where a single block meets the panel: a power of two, for the first cache."""
GAP_BYTES = 4096
"""After each worker's decoded steps: the CPU prefetches beyond the end of what is read again and again, and would take lines from the core that
writes them.
"""
MOST_STEPS = 18
"""Steps of the sum for which a panel stays in the first cache, beside the rows that pass; longer sums are made in parts."""
TURN_STEPS, TURN_ROWS, TURN_BYTES = 8, 160, 1 << 20
"""Where few rows wait for memory, it is read in its order: all parts of a panel in turn, each so short that the first cache also has
room for lines on their way from memory. So many rows at most, of so many bytes, because each panel reads them from the second cache again.
"""
MOST_PANELS = 16
"""Panels of a group: between two parts the sums of a group and a range stay in the second cache, where the rows that pass are read again."""
RANGE_ROWS = 256
"""Rows of a range, about: of long sums a range's rows stay in the second cache, beside the sums between two parts."""


@dataclass(frozen=True, slots=True)
class Plan:
    """How a product is shared out: ranges of rows, blocks of a range at most, panels of a group, steps of a part, whether a panel's parts are
    multiplied in turn instead of the panels of a group, and the bytes that a worker needs for the sums of one ticket between two parts, and
    for the decoded steps of a part of a coded panel.
    """

    ranges: int
    blocks: int
    panels: int
    steps: int
    in_turn: bool
    partial_bytes: int
    decoded_bytes: int


@cache
def plan(rows: int, steps: int, panels: int, workers: int) -> Plan:
    """For a product of so many rows, steps of 32 (bytes: 64) inputs, and panels."""
    panel_bytes = max(1, steps) * STEP_BYTES
    if rows <= BLOCK_ROWS:
        return Plan(
            1,
            1,
            max(1, min(panels // PIECES, PIECE_BYTES // panel_bytes)),
            max(1, steps),
            False,
            0,
            RING_STEPS * STEP_BYTES + GAP_BYTES,
        )
    ranges = max(1, (rows + RANGE_ROWS // 2) // RANGE_ROWS)
    in_range = -(-rows // ranges) + TILE_ROWS
    in_turn = steps > MOST_STEPS and rows <= TURN_ROWS and rows * steps * LINE <= TURN_BYTES
    parts = max(1, -(-steps // (TURN_STEPS if in_turn else MOST_STEPS)))
    each = max(1, -(-steps // parts))
    groups = -(-panels // MOST_PANELS)
    groups = min(panels, -(-groups * ranges // workers) * workers // ranges)  # all workers have equally many
    in_group = -(-panels // groups)
    partial_bytes = in_range * (1 if in_turn else in_group) * ROW_BYTES if parts > 1 else 0
    decoded_bytes = each * STEP_BYTES + GAP_BYTES
    return Plan(ranges, -(-in_range // BLOCK_ROWS), in_group, each, in_turn, partial_bytes, decoded_bytes)


@inlined
def block_rows(left: int) -> int:
    """The rows of the next block of those that are left, such that none of several has fewer than 17."""
    if left <= BLOCK_ROWS:
        return left
    return BLOCK_ROWS if left > BLOCK_ROWS + TILE_ROWS else 2 * TILE_ROWS


@inlined
def range_begin(number: int, ranges: int, rows: int) -> int:
    """The first row of a range, a multiple of 16."""
    return rows if number == ranges else rows * number // ranges // TILE_ROWS * TILE_ROWS


@inlined
def panel_and_part(number: int, panels: int, parts: int, in_turn: int) -> tuple[int, int]:
    """What a worker multiplies as this number of a group: the panel and the part of its sums."""
    if in_turn:
        return number // parts, number % parts
    return number % panels, number // panels


@cache
def tile_product_kernel(kind: int, in_bytes: int, coded: int, adapted: int, ending: int) -> Any:
    """Arguments: rows, inner, panels; x, its stride; weight; out, its stride; factors (0: none); segments, their number; low, as
    `low_rank_kernel` left it, its stride, or x in bytes, as `quantise_kernel` left it, its rows' scales; the bytes between such rows;
    start (0: none); the columns' scales and begins of a weight in bytes; workers; a plan's ranges, panels and steps; partial sums, bytes a worker;
    room for what adapters add, BEGIN_ROOM bytes for each block and panel of a ticket, bytes a worker; where coded, room for decoded steps, bytes a worker;
    whether a plan's parts take turns.

    `in_bytes`: the weight is [panels, inner / 4, 32, 4] bytes, filled up with zeros to whole steps, else [panels, inner / 2, 32, 2] bfloat16, or `coded`. `adapted`: sums begin at what the segments'
    adapters add (`engine.cpu.kernels.lora`). `ending` is STORE, ADD, GATE or WIDEN; what is stored is of `kind`.
    """
    out_element = 4 if ending in (ADD, WIDEN) or kind == F32 else 2
    columns = LANES if ending == GATE else PANEL
    step_inputs = 64 if in_bytes else 32
    step_bytes, head_bytes = (STEP_GROUPS * GROUP_BYTES, HEAD_BYTES) if coded else (STEP_BYTES, 0)
    step_lines = step_bytes // LINE

    @kernel
    def tile_product(data: Any) -> None:
        a = address_of(data)
        rows, inner, panels = load_int(a, 2), load_int(a, 3), load_int(a, 4)
        x, x_bytes, weight = load_int(a, 5), 2 * load_int(a, 6), load_int(a, 7)
        out, stride, factors = load_int(a, 8), load_int(a, 9), load_int(a, 10)
        segments, end_segments = load_int(a, 11), load_int(a, 11) + SEGMENT_BYTES * load_int(a, 12)
        low, low_stride = load_int(a, 13), load_int(a, 14)
        scales, start = load_int(a, 14), load_int(a, 16)
        column_scales, begins, workers = load_int(a, 17), load_int(a, 18), load_int(a, 19)
        ranges, panels_each, steps_each = load_int(a, 20), load_int(a, 21), load_int(a, 22)
        worker = take_ticket(a + 8)
        partials = load_int(a, 23) + worker * load_int(a, 24)
        if in_bytes:
            x, x_bytes, inner = low, load_int(a, 15), (inner + LINE - 1) // LINE * LINE
        steps, panel_bytes = inner // step_inputs, inner * PANEL if in_bytes else bytes_of_panel(inner, 2, coded)
        parts = max(1, (steps + steps_each - 1) // steps_each)
        pairs_left = 0 if in_bytes else inner // 2 - steps * TILE_ROWS
        room = make_room()
        begin_sums = load_int(a, 25) + worker * load_int(a, 26)
        decoded = load_int(a, 27) + worker * load_int(a, 28)
        around = RING_STEPS - 1 if rows <= BLOCK_ROWS else -1
        in_turn = load_int(a, 29)
        left = reserve(STEP_BYTES)
        store_int(room, STRIDE, stride)
        shape_tiles(min(rows, TILE_ROWS))
        while True:
            ticket = take_ticket(a)
            begin_panel = ticket // ranges * panels_each
            if begin_panel >= panels:
                break
            end_panel = min(begin_panel + panels_each, panels)
            head, end = range_begin(ticket % ranges, ranges, rows), range_begin(ticket % ranges + 1, ranges, rows)
            blocks = (end - head + BLOCK_ROWS - 1) // BLOCK_ROWS
            # The group that this worker probably takes next.
            next_panel = (ticket + workers) // ranges * panels_each
            if adapted:
                block, first = 0, head
                while first < end:
                    count = block_rows(end - first)
                    begin_block(
                        first, count, begin_panel, end_panel, segments, end_segments, low, low_stride,
                        begin_sums + block * panels_each * BEGIN_ROOM, next_panel if blocks == 1 else panels, panels,
                    )  # fmt: skip
                    first += count
                    block += 1
                shape_tiles(min(rows, TILE_ROWS))
            group = end_panel - begin_panel
            for number in range(group * parts):
                panel, part = panel_and_part(number, group, parts, in_turn)
                panel += begin_panel
                first_step = part * steps_each
                part_steps = min(steps_each, steps - first_step)
                final = part == parts - 1
                column = panel * PANEL
                packed = weight + panel * panel_bytes
                place = decoded if coded else packed + first_step * STEP_BYTES
                ahead_panel, ahead_part = next_panel, 0
                if number + 1 < group * parts:
                    ahead_panel, ahead_part = panel_and_part(number + 1, group, parts, in_turn)
                    ahead_panel += begin_panel
                part_lines = min(steps_each, steps - ahead_part * steps_each) * step_lines
                following = weight + ahead_panel * panel_bytes + head_bytes + ahead_part * steps_each * step_bytes
                block, first = 0, head
                while first < end:
                    count = block_rows(end - first)
                    turn = FIRST_BLOCK if coded and first == head else LATER_BLOCK
                    if blocks == 1:
                        turn = ONLY_BLOCK
                    held = partials + (first - head) * ROW_BYTES
                    if not in_turn:
                        held += (panel - begin_panel) * (end - head) * ROW_BYTES
                    begin, begin_bytes = held, ROW_BYTES
                    if part == 0:
                        begin, begin_bytes = start + 4 * column if start else 0, 0
                        if in_bytes:
                            begin = begins + 4 * column
                        if adapted:
                            begin = begin_sums + (block * panels_each + panel - begin_panel) * BEGIN_ROOM
                            begin_bytes = ROW_BYTES
                    target, ahead, lines = out + (first * stride + panel * columns) * out_element, following, 0
                    if ahead_panel < panels:
                        ahead += part_lines * block // blocks * LINE
                        lines = part_lines * (block + 1) // blocks - part_lines * block // blocks
                    multiply_block(
                        room, count, x + first * x_bytes + first_step * LINE, x_bytes, place, part_steps,
                        begin, begin_bytes, 0 if final else held, target if final else 0, turn, ahead, lines, packed, first_step * STEP_GROUPS, around,
                        kind, in_bytes, coded, ending,
                    )  # fmt: skip
                    if final:
                        if not in_bytes:
                            if pairs_left:
                                rest = packed
                                if coded:
                                    decode_groups(left, packed, steps * STEP_GROUPS, pairs_left // 2)
                                    rest = left - steps * STEP_BYTES
                                add_pairs_left(
                                    room, count, x + first * x_bytes, x_bytes // 2, rest, steps * TILE_ROWS, pairs_left,
                                )  # fmt: skip
                            if factors:
                                scale_rows(room, count, factors + 8 * first, column)
                        else:
                            store_int(room, SCALES, scales + 4 * first)
                            store_int(room, COLUMN_SCALES, column_scales + 4 * column)
                            store_int(room, START, start + 4 * column if start else 0)
                        store_int(room, NEXT, 0)
                        store_int(room, END, count)
                        store_int(room, OUT, target)
                    first += count
                    block += 1
        end_block(room, kind, in_bytes, ending)
        release_tiles()

    return tile_product
