"""bfloat16 weights in twelve bits a number, without loss: what memory is read for shrinks by a quarter.

A number's low byte (seven bits of its fraction, one of its exponent) is kept. Its high byte, the sign and the rest of the exponent,
is one of few: sixteen of them, in a table that each panel has of its own, cover eight pairs of exponents with both signs. So four bits stand for
it. Groups with a number whose high byte is not in the table are kept as they are beside the panel; of random normal numbers they
are about one of a hundred. Decoding takes a shuffle of bytes for the table and two that interleave low and high bytes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import torch
from llvmlite import ir
from llvmlite.binding import get_host_cpu_features
from numba.core import cgutils

from engine.cpu.kernels.compiled import over_arrays
from engine.cpu.kernels.emit import (
    BYTE,
    F32,
    I16,
    I32,
    I64,
    LANES,
    WORDS,
    load_words,
    pointer_at,
    prefetch_element,
)

LINE = 64
GROUP_INPUTS = 4
"""Inputs of a group: two steps of pairs, whose codes share their bytes."""
GROUP_BYTES = 3 * LINE
"""A group: the low bytes of either step, then the codes, those of the first step in the low halves."""
HEAD_BYTES = LINE
"""A panel's head: its table [16] bytes, then int64 the number of its kept groups and how many bytes after the head the first one lies."""
COUNT_WORD, OFFSET_WORD = 2, 3
KEPT_BYTES = LINE + 4 * LINE
"""A kept group: int64 its number, filled up to a line, then two steps of pairs."""
MOST_KEPT = 1 / 16
"""Of all groups of a weight; with more it is not worth coding."""
CODES = 16
GROUPS_AHEAD = 16
"""Groups between a prefetch and its use."""

BYTES = ir.VectorType(BYTE, LINE)


@cache
def can_code() -> bool:
    """Whether this CPU shuffles bytes in whole registers (AVX-512)."""
    return bool(get_host_cpu_features().get("avx512bw"))


@dataclass(frozen=True, slots=True)
class CodedWeight:
    """`packed`: uint8, panels of a head and groups, then all kept groups."""

    packed: torch.Tensor
    panels: int
    inner: int


def panel_bytes(inner: int) -> int:
    """Bytes from one panel to the next, for so many inputs."""
    return HEAD_BYTES + inner // GROUP_INPUTS * GROUP_BYTES


@cache
def _encoder() -> Callable[..., None]:
    """Codes panels [P, groups, 2, 2, 4, 8, 2] of bytes (step, half of the columns, quarter of a register, number, low and high byte)
    into `out` [P, bytes of a panel], and says which groups have a number that is not in the table.
    """
    signature = "void(uint8[:, :, :, :, :, :, ::1], uint8[:, ::1], boolean[:, ::1])"

    @over_arrays(signature)
    def code(packed: Any, out: Any, foreign: Any) -> None:
        for panel in range(packed.shape[0]):
            counts, codes = np.zeros(256, np.int64), np.full(256, CODES, np.uint8)
            for high in packed[panel, :, :, :, :, :, 1].flat:
                counts[high] += 1
            for number in range(CODES):
                best = np.argmax(counts)
                out[panel, number], codes[best], counts[best] = best, number, -1
            for group in range(packed.shape[1]):
                begin = HEAD_BYTES + GROUP_BYTES * group
                for step in range(2):
                    for half in range(2):
                        for quarter in range(4):
                            for t in range(8):
                                low, high = packed[panel, group, step, half, quarter, t]
                                place = begin + 16 * quarter + 8 * half + t
                                found = codes[high]
                                foreign[panel, group] |= found == CODES
                                out[panel, place + LINE * step] = low
                                out[panel, place + 2 * LINE] |= (found & 15) << (4 * step)

    return code


def encode(packed: torch.Tensor) -> CodedWeight | None:
    """A weight in pairs, [panels, in / 2, 32, 2] bfloat16, or None where coding gains nothing or `in` is not a multiple of 4."""
    panels, inner = packed.shape[0], 2 * packed.shape[1]
    groups, size = inner // GROUP_INPUTS, panel_bytes(inner)
    if inner % GROUP_INPUTS:
        return None
    source = packed.contiguous().view(torch.uint8).numpy()
    out, foreign = np.zeros((panels, size), np.uint8), np.zeros((panels, groups), np.bool_)
    _encoder()(source.reshape(panels, groups, 2, 2, 4, 8, 2), out, foreign)
    if foreign.sum() > MOST_KEPT * foreign.size:
        return None
    heads, counts = np.zeros((panels, HEAD_BYTES // 8), np.int64), foreign.sum(1)
    heads[:, COUNT_WORD] = counts
    heads[:, OFFSET_WORD] = out.size + KEPT_BYTES * (np.cumsum(counts) - counts) - size * np.arange(panels)
    out[:, CODES:HEAD_BYTES] = heads.view(np.uint8)[:, CODES:]
    kept = np.zeros((foreign.sum(), KEPT_BYTES), np.uint8)
    kept[:, :8] = np.nonzero(foreign)[1].astype(np.int64)[:, None].view(np.uint8)
    kept[:, LINE:] = source.reshape(panels, groups, 4 * LINE)[foreign]
    return CodedWeight(torch.from_numpy(np.concatenate([out.ravel(), kept.ravel()])), panels, inner)


def decode(coded: CodedWeight) -> torch.Tensor:
    """What `encode` was given, in a copy."""
    panels, groups, size = coded.panels, coded.inner // GROUP_INPUTS, panel_bytes(coded.inner)
    memory = coded.packed.numpy()
    table = memory[: panels * size].reshape(panels, size)
    body = table[:, HEAD_BYTES:].reshape(panels, groups, 3, LINE)
    codes = np.stack([body[:, :, 2] & 15, body[:, :, 2] >> 4], 2)
    highs = table[np.arange(panels)[:, None, None, None], codes]
    both = np.stack([body[:, :, :2], highs], -1).reshape(panels, groups, 2, 4, 2, 8, 2)
    out = np.ascontiguousarray(both.transpose(0, 1, 2, 4, 3, 5, 6)).reshape(panels, groups, 4 * LINE)
    heads = np.ascontiguousarray(table[:, :HEAD_BYTES]).view(np.int64)
    for panel in np.flatnonzero(heads[:, COUNT_WORD]):
        begin = panel * size + heads[panel, OFFSET_WORD]
        kept = memory[begin : begin + heads[panel, COUNT_WORD] * KEPT_BYTES].reshape(-1, KEPT_BYTES)
        out[panel, np.ascontiguousarray(kept[:, :8]).view(np.int64)[:, 0]] = kept[:, LINE:]
    return torch.from_numpy(out).view(torch.bfloat16).view(panels, coded.inner // 2, 2 * LANES, 2)


def load_table(builder: Any, panel: Any) -> Any:
    """The panel's table, once in each quarter of a register."""
    quarter = builder.load(pointer_at(builder, panel, I64(0), BYTE, ir.VectorType(BYTE, CODES)), align=16)
    places = ir.Constant(ir.VectorType(I32, LINE), [*range(CODES)] * 4)
    return builder.shuffle_vector(quarter, quarter, places)


@dataclass(frozen=True, slots=True)
class Kept:
    """A panel's kept groups: the address of the first one, and their number."""

    first: Any
    count: Any


def load_kept(builder: Any, panel: Any) -> Kept:
    """Where they are."""
    count, offset = (builder.load(pointer_at(builder, panel, I64(word), I64)) for word in (COUNT_WORD, OFFSET_WORD))
    return Kept(builder.add(panel, offset), count)


def load_kept_number(builder: Any, kept: Kept, index: Any) -> Any:
    """The number of a kept group."""
    there = builder.add(kept.first, builder.mul(index, I64(KEPT_BYTES)))
    return builder.load(pointer_at(builder, there, I64(0), I64))


def load_kept_group(builder: Any, kept: Kept, index: Any) -> tuple[Any, list[list[Any]]]:
    """The number of a kept group, and its pairs as `load_group` gives them."""
    there = builder.add(kept.first, builder.mul(index, I64(KEPT_BYTES)))
    places = [[I64(LINE // 2 * (1 + 2 * s + v)) for v in range(2)] for s in range(2)]
    steps = [[load_words(builder, there, place) for place in both] for both in places]
    return load_kept_number(builder, kept, index), steps


def prefetch_group(builder: Any, panel: Any, group: Any, where: int, ahead: int = GROUPS_AHEAD) -> None:
    """Prefetch the group that is read `ahead` groups later."""
    begin = builder.mul(builder.add(group, I64(ahead)), I64(GROUP_BYTES // 4))
    for line in range(GROUP_BYTES // LINE):
        prefetch_element(builder, panel, builder.add(begin, I64(LINE // 4 * (line + 1))), F32, where)


def load_group(builder: Any, panel: Any, table: Any, group: Any) -> list[list[Any]]:
    """The pairs of a group: of either step the 16 first and the 16 other columns, as words of 32 bits."""
    begin = builder.add(builder.mul(group, I64(GROUP_BYTES)), I64(HEAD_BYTES))
    lows = [
        builder.load(pointer_at(builder, panel, builder.add(begin, I64(LINE * s)), BYTE, BYTES), align=1)
        for s in range(2)
    ]
    codes = builder.load(pointer_at(builder, panel, builder.add(begin, I64(2 * LINE)), BYTE, BYTES), align=1)
    halves = ir.VectorType(I16, LINE // 2)
    shifted = builder.lshr(builder.bitcast(codes, halves), ir.Constant(halves, [4] * (LINE // 2)))
    fifteen = ir.Constant(BYTES, [15] * LINE)
    signature = ir.FunctionType(BYTES, [BYTES, BYTES])
    shuffle = cgutils.get_or_insert_function(builder.module, signature, "llvm.x86.avx512.pshuf.b.512")
    steps = []
    for low, code in zip(lows, (codes, builder.bitcast(shifted, BYTES)), strict=True):
        high = builder.call(shuffle, [table, builder.and_(code, fifteen)])
        both = []
        for half in range(2):
            order = [
                at
                for lane in range(4)
                for t in range(8)
                for at in (16 * lane + 8 * half + t, LINE + 16 * lane + 8 * half + t)
            ]
            mixed = builder.shuffle_vector(low, high, ir.Constant(ir.VectorType(I32, LINE), order))
            both.append(builder.bitcast(mixed, WORDS))
        steps.append(both)
    return steps


def store_group(builder: Any, out: Any, place: Any, steps: list[list[Any]]) -> None:
    """Store a group's pairs as number `place` of `out`, [groups, 2, 32, 2]."""
    begin = builder.mul(place, I64(4 * LANES))
    for number, words in enumerate(each for both in steps for each in both):
        there = builder.add(begin, I64(LANES * number))
        builder.store(words, pointer_at(builder, out, there, I32, WORDS), align=4)
