"""The rows of a step that its last layer computes: those whose logits are wanted. Of a prompt's other tokens nothing is
needed after the last layer but their keys and values. It knows batches, and no tensors of a model.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from engine.batch import ForwardBatch, Segments

LEAST_LEFT_OUT = 32
"""Rows that must be left out, or else the layer computes all of them: fewer cost less than to pick out the others."""


@dataclass(frozen=True, slots=True)
class WantedRows:
    """W rows of a step of more: the last ones of each sequence, from the first whose logits are wanted."""

    rows: torch.Tensor
    """[W] int64, ascending: their numbers in the step."""
    logits_rows: torch.Tensor
    """[L] int64: which of them get logits."""
    sequences: list[tuple[int, int, int, list[int]]]
    """As `AttentionPlan` takes them, the first row of each counted among the W."""
    segments: Segments
    """The adapters of the W rows."""


def wanted_rows(batch: ForwardBatch) -> WantedRows | None:
    """None if the last layer computes all rows."""
    count = batch.input_ids.shape[1]
    if len(batch.logits_rows) + LEAST_LEFT_OUT > count:
        return None
    logits = sorted(batch.logits_rows.tolist())
    rows: list[int] = []
    sequences: list[tuple[int, int, int, list[int]]] = []
    for sequence in batch.sequences:
        end, place = sequence.row + sequence.count, bisect_left(logits, sequence.row)
        if place < len(logits) and logits[place] < end:
            sequences.append((len(rows), end - logits[place], sequence.length, sequence.blocks))
            rows += range(logits[place], end)
    if len(rows) + LEAST_LEFT_OUT > count:
        return None
    numbers = torch.tensor(rows, dtype=torch.int64)
    segments = [
        (bisect_left(rows, first), bisect_left(rows, first + many), digest) for first, many, digest in batch.segments
    ]
    return WantedRows(
        numbers,
        torch.searchsorted(numbers, batch.logits_rows),
        sequences,
        tuple((first, end - first, digest) for first, end, digest in segments if end > first),
    )
