"""The tensors of one step: built from a scheduled batch, used by the attention function and the model runner."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from engine.block_pool import TRASH_BLOCK
from engine.models.long_rope import LONG
from engine.request import PENDING

if TYPE_CHECKING:
    from engine.request import Request
    from engine.scheduled_batch import ScheduledBatch

Segments = tuple[tuple[int, int, str], ...]
"""(first row, number of rows, adapter digest) of a step's segments: rows with one adapter. Other rows are in none."""

MIN_ROWS = 2
"""Steps of one row are padded, because torch's own products (of experts, for example) round a single row differently.
"""


@dataclass(slots=True)
class SequenceSlice:
    """`count` new tokens of one sequence, at rows `row`..`row + count`, ending at context `length`."""

    row: int
    count: int
    length: int
    blocks: list[int]


@dataclass(slots=True)
class Chosen:
    """The unread tokens of a launched step: [N] int64 on the device, and the row of each request in it."""

    tokens: torch.Tensor
    rows: dict[Request, int]


@dataclass(slots=True)
class ForwardBatch:
    """The inputs of a forward pass. T rows, of which the last may be padding; L rows get logits.

    input_ids, positions: [1, T] int64; those of long sequences with the mark `LONG`. slot_mapping: [T] int64.
    logits_rows: [L] int64.
    """

    input_ids: torch.Tensor
    positions: torch.Tensor
    slot_mapping: torch.Tensor
    sequences: list[SequenceSlice]
    logits_rows: torch.Tensor
    sampled: list[tuple[Request, int]]
    """The first logits rows: the request whose token is sampled from the row, and the number of its draft tokens before
    it.
    """
    drafts: dict[Request, list[int]]
    """As in the scheduled batch."""
    prompt_rows: list[tuple[Request, int, int]]
    """(request, first prompt position, count): further logits rows, for prompt log-probabilities."""
    segments: Segments = ()
    """Rows that have an adapter."""
    chosen: torch.Tensor | None = None
    """[N] int64, on the device: the tokens of the previous step; an input id of -1 - n stands for the n-th of them."""


def build_batch(scheduled: ScheduledBatch, block_size: int, chosen: Chosen | None = None) -> ForwardBatch:
    """Build the step's tensors. Rows are in the scheduler's order, but grouped by adapter. PENDING tokens are taken
    from `chosen`.
    """
    ids: list[int] = []
    positions: list[int] = []
    slots: list[int] = []
    sequences: list[SequenceSlice] = []
    sampled: list[tuple[Request, int]] = []
    sampled_rows: list[int] = []
    prompt_rows: list[tuple[Request, int, int]] = []
    prompt_row_numbers: list[int] = []
    segments: list[tuple[int, int, str]] = []
    pairs = list(zip(scheduled.requests, scheduled.num_new_tokens, strict=True))
    if any(request.adapter is not None for request in scheduled.requests):  # group the rows by adapter
        pairs.sort(key=lambda pair: "" if pair[0].adapter is None else pair[0].adapter.digest)
    for request, count in pairs:
        start, row = request.num_computed_tokens, len(ids)
        end = start + count
        drafts = scheduled.drafts.get(request, [])
        ids += request.token_ids[start:end]
        if ids[-1] == PENDING:
            assert chosen is not None
            ids[-1] = -1 - chosen.rows[request]
        ids += drafts
        mark = LONG if request.is_long else 0
        table = request.block_table
        for position in range(start, end):
            positions.append(mark + position)
            slots.append(table[position // block_size] * block_size + position % block_size)
        used = table[: -(-end // block_size)]
        sequences.append(SequenceSlice(row, count, end, used))
        if request.adapter is not None:
            _extend_segments(segments, row, count, request.adapter.digest)
        if end == len(request.token_ids) + len(drafts):
            sampled += [(request, number) for number in range(1 + len(drafts))]
            sampled_rows += range(row + count - 1 - len(drafts), row + count)
        wanted = request.prompt_rows(end)
        if wanted:
            prompt_rows.append((request, wanted.start, len(wanted)))
            prompt_row_numbers += range(row + wanted.start - start, row + wanted.stop - start)
    for _ in range(MIN_ROWS - len(ids)):
        ids.append(0)
        positions.append(0)
        slots.append(TRASH_BLOCK * block_size)
    return ForwardBatch(
        input_ids=torch.tensor([ids]),
        positions=torch.tensor([positions]),
        slot_mapping=torch.tensor(slots),
        sequences=sequences,
        logits_rows=torch.tensor(sampled_rows + prompt_row_numbers, dtype=torch.int64),
        sampled=sampled,
        drafts=scheduled.drafts,
        prompt_rows=prompt_rows,
        segments=tuple(segments),
        chosen=chosen.tokens if chosen is not None and min(ids) < 0 else None,
    )


def fill_in(ids: torch.Tensor, chosen: torch.Tensor | None) -> torch.Tensor:
    """The input ids with placeholders (`ForwardBatch.chosen`) replaced by the tokens of `chosen`, on their device."""
    return ids if chosen is None else torch.where(ids < 0, chosen[(-1 - ids).clamp_min(0)], ids)


def _extend_segments(segments: list[tuple[int, int, str]], row: int, count: int, digest: str) -> None:
    if segments and segments[-1][2] == digest:
        row, count = segments[-1][0], segments.pop()[1] + count
    segments.append((row, count, digest))
