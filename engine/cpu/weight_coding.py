"""Whether bfloat16 weights are kept in twelve bits a number (`engine.cpu.kernels.coded`), by measuring both forms on this machine.

Coded products are faster where memory is what a step waits for, and slower where it is arithmetic: that depends on the CPU, its memory
and its neighbours. Results are the same to the last bit, so nothing but time depends on the choice.
"""

from __future__ import annotations

import logging
import time
from dataclasses import replace
from functools import cache
from typing import TYPE_CHECKING

import torch

from engine.cpu import large_pages
from engine.cpu.kernels import ops
from engine.cpu.kernels.coded import can_code, encode
from engine.cpu.spaced_rows import spaced_rows

if TYPE_CHECKING:
    from collections.abc import Sequence

    from engine.cpu.kernels.coded import CodedWeight

LEAST_BYTES = 128 << 20
"""Smaller models are left as they are: caches hold a good part of them."""
OUTPUTS, INPUTS, COPIES = 2048, 1024, 48
"""The weight that is tried, and its copies: together more than most caches hold."""
TRIALS = ((1, COPIES, 0.9), (8, COPIES, 1.0), (32, COPIES, 1.12), (256, 8, 1.1))
"""Rows, copies that are multiplied, and the part of the time of plain weights that coded ones may take."""
ROUNDS = 5

logger = logging.getLogger(__name__)


def coded_weights(setting: str, dtype: torch.dtype, weight_bytes: int) -> bool:
    """Whether a model's weights of this type and size are coded. `setting`: "on", "off" or "auto", which is decided by `worthwhile`."""
    if setting == "off" or (setting == "auto" and weight_bytes < LEAST_BYTES):
        return False
    if dtype != torch.bfloat16 or not can_code():
        if setting == "on":
            logger.warning("weights are not coded: that takes bfloat16 weights and a CPU with AVX-512")
        return False
    return setting == "on" or worthwhile()


@cache
def worthwhile() -> bool:
    """Whether coded weights pass all TRIALS with the current number of threads. It takes half a second, once in a process."""
    packed = ops.pack_weight(torch.randn(OUTPUTS, INPUTS, generator=torch.Generator().manual_seed(0)).bfloat16())
    coded = encode(packed)
    assert coded is not None
    plain, other = copies_of(packed, coded, COPIES)
    parts = [_part_of_time(plain[:copies], other[:copies], rows) for rows, copies, _ in TRIALS]
    found = all(part <= most for part, (_, _, most) in zip(parts, TRIALS, strict=True))
    told = ", ".join(f"{part:.2f} at {rows} rows" for part, (rows, _, _) in zip(parts, TRIALS, strict=True))
    logger.info("weights are %s: coded products take of the time of plain ones %s", "coded" if found else "plain", told)
    return found


def copies_of(packed: torch.Tensor, coded: CodedWeight, count: int) -> tuple[list[torch.Tensor], list[CodedWeight]]:
    """Copies of a weight in both forms, as layers keep them."""
    plain = [large_pages.moved(packed) for _ in range(count)]
    return plain, [replace(coded, packed=large_pages.moved(coded.packed)) for _ in range(count)]


def seconds_of(
    plain: list[torch.Tensor], coded: list[CodedWeight], x: torch.Tensor, out: torch.Tensor, rounds: int
) -> tuple[float, float]:
    """The time of products of x with all plain weights, and with all coded ones: the best of some rounds, in which they take turns."""
    forms: tuple[Sequence[torch.Tensor | CodedWeight], ...] = (plain, coded)
    best = [float("inf"), float("inf")]
    for _ in range(rounds + 1):  # the first one also compiles
        for form, weights in enumerate(forms):
            begun = time.perf_counter()
            for weight in weights:
                ops.linear(x, weight, None, out)
            best[form] = min(best[form], time.perf_counter() - begun)
    return best[0], best[1]


def _part_of_time(plain: list[torch.Tensor], coded: list[CodedWeight], rows: int) -> float:
    """The time of coded products by that of plain ones."""
    x, out = (spaced_rows(rows, width, torch.bfloat16) for width in (INPUTS, OUTPUTS))
    plain_s, coded_s = seconds_of(plain, coded, x, out, ROUNDS)
    return coded_s / plain_s
