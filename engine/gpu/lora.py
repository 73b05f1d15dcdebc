"""Adapters on a device, in slots of one size, so that shapes do not depend on a step's adapters.

Few rows are multiplied by the factors of their own adapters alone (engine/gpu/low_rank.py). Many take a product over all slots, of which the columns
of other slots are zeroed, and one for each of the model's layers that a layer combines; so do rows beside an adapter of DoRA.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import nn
from transformers.pytorch_utils import Conv1D

from engine.adapters.peft import dora_factors
from engine.gpu import low_rank
from engine.gpu.attention import to_device

if TYPE_CHECKING:
    from engine.adapters.peft import Adapter
    from engine.batch import Segments


@dataclass(slots=True)
class SlotWeights:
    """One adapter's weights for one of the layers that a SlotLinear combines: A [rank, in], B [rank, out], and factors [out] for
    DoRA.
    """

    a: torch.Tensor
    b: torch.Tensor
    factors: torch.Tensor | None


class Slots:
    """The adapters' slots and the current step's mask; shared by all layers of a model."""

    def __init__(self, count: int, rank: int, device: torch.device) -> None:
        self.count, self.rank, self.device = count, rank, device
        self.numbers: dict[str, int] = {}
        self.ranks = torch.zeros(count, dtype=torch.int32, device=device)
        """The largest rank that the adapter in each slot has in any layer."""
        self._known_ranks: dict[str, int] = {}
        self._slot_of_column = torch.arange(count, device=device).repeat_interleave(rank)
        self.rows = 0
        """The rows of the current step."""
        self.mask: torch.Tensor | None = None
        """[T, slots * rank] bool: the columns of the row's slot; None in steps without adapters."""
        self.row_slots: torch.Tensor | None = None
        """[T] int64: the slot of each row, or `count` for rows without an adapter."""
        self.capturing = False
        """Whether the step is captured, so that layers compute whatever may come to be in their slots."""
        self.with_factors: set[str] = set()
        """Digests of the adapters that have factors, which no captured step computes."""

    def take(self, digest: str) -> int:
        """Assign a slot to the adapter, unless it has one; returns the slot."""
        if digest not in self.numbers:
            self.numbers[digest] = min(set(range(self.count)) - set(self.numbers.values()))
            self._known_ranks[digest] = 0
        return self.numbers[digest]

    def has_rank(self, digest: str, rank: int) -> None:
        """An adapter with a slot has this rank in some layer."""
        if rank > self._known_ranks[digest]:
            self._known_ranks[digest] = rank
            self.ranks[self.numbers[digest]] = rank

    def free(self, digest: str) -> None:
        """Give the adapter's slot back, if it has one."""
        self.numbers.pop(digest, None)
        self._known_ranks.pop(digest, None)
        self.with_factors.discard(digest)

    def slots_of(self, segments: Segments, rows: int) -> torch.Tensor:
        """The slot of each of a step's rows, [rows] int64 on the host."""
        of_row = torch.full((rows,), self.count)
        for first, number, digest in segments:
            of_row[first : first + number] = self.numbers[digest]
        return of_row

    def begin_step(self, segments: Segments, rows: int) -> None:
        """Set the step's adapter mask; valid until `end_step`."""
        self.rows = rows
        if segments:
            self._mask(to_device(self.slots_of(segments, rows), self.device))

    def begin_capture(self, row_slots: torch.Tensor) -> None:
        """The same for a step that is captured: the mask will follow the numbers in `row_slots` [T] int64."""
        self.rows, self.capturing = len(row_slots), True
        self._mask(row_slots)

    def _mask(self, row_slots: torch.Tensor) -> None:
        self.row_slots, self.mask = row_slots, row_slots[:, None] == self._slot_of_column

    def end_step(self) -> None:
        """Clear the step's adapter mask."""
        self.rows, self.mask, self.row_slots, self.capturing = 0, None, None, False


class SlotLinear(nn.Module):
    """A linear layer, with the adapters in the slots. It may combine several of the model's layers with the same inputs."""

    def __init__(self, base: nn.Module, parts: list[tuple[str, int]], slots: Slots) -> None:
        """`base`: an `nn.Linear` or `Conv1D` whose outputs are those of `parts`, (path, outputs), in order."""
        super().__init__()
        weight = base.weight.t() if type(base) is Conv1D else base.weight
        self.base, self.parts, self.slots = base, parts, slots
        self.out_features, self.in_features = weight.shape
        self._ends = [*accumulate(width for _, width in parts)]
        self._columns = [slice(end - width, end) for end, (_, width) in zip(self._ends, parts, strict=True)]
        self.other_rows = False
        self._mine: dict[str, int] = {}
        self._a: torch.Tensor | None = None
        """[parts * slots * rank, in]: by part, then by slot."""
        self._b: torch.Tensor | None = None
        """[slots * rank, out]"""
        self._factors: torch.Tensor | None = None

    def _weight(self) -> torch.Tensor:
        weight: torch.Tensor = self.base.weight.t() if type(self.base) is Conv1D else self.base.weight
        return weight

    def make(self, adapter: Adapter) -> list[SlotWeights | None] | None:
        """The adapter's weights for each part, on the host (in pinned memory if there is a device); None if it adapts no part. Raises
        AdapterError.
        """
        made = [
            self._make(adapter, path, columns) for (path, _), columns in zip(self.parts, self._columns, strict=True)
        ]
        return made if any(made) else None

    def _make(self, adapter: Adapter, path: str, columns: slice) -> SlotWeights | None:
        found = adapter.modules.get(path)
        if found is None:
            return None
        factors = None
        if found.magnitude is not None:
            weight = self._weight()[columns].detach().float().cpu()
            factors = dora_factors(path, found.magnitude, weight + found.b @ found.a)
        a, b = found.narrowed(path, self._weight().dtype)
        b = b.t().contiguous()
        if self.slots.device.type == "cuda":
            a, b = a.pin_memory(), b.pin_memory()
        return SlotWeights(a, b, factors)

    @torch.inference_mode()
    def make_room(self) -> None:
        """Allocate what the slots take in this layer, unless it is there."""
        if self._a is None or self._b is None:
            size, weight = self.slots.count * self.slots.rank, self._weight()
            self._a = weight.new_zeros(len(self.parts) * size, self.in_features)
            self._b = weight.new_zeros(size, self.out_features)

    @torch.inference_mode()
    def put(self, digest: str, weights: list[SlotWeights | None] | None) -> None:
        slot = self.slots.take(digest)
        if weights is None:
            return
        self._mine[digest] = slot
        size, rank = self.slots.count * self.slots.rank, self.slots.rank
        self.make_room()
        assert self._a is not None
        assert self._b is not None
        for part, (columns, given) in enumerate(zip(self._columns, weights, strict=True)):
            if given is None:
                continue
            own = given.a.shape[0]
            self.slots.has_rank(digest, own)
            self._a[part * size + slot * rank :][:own].copy_(given.a, non_blocking=True)
            self._b[slot * rank :][:own, columns].copy_(given.b, non_blocking=True)
            if given.factors is not None:
                if self._factors is None:
                    self._factors = self._weight().new_ones(self.slots.count + 1, self.out_features)
                self.slots.with_factors.add(digest)
                self._factors[slot, columns] = given.factors.to(self._factors)

    @torch.inference_mode()
    def drop(self, digest: str) -> None:
        self.slots.free(digest)
        slot = self._mine.pop(digest, None)
        if slot is None or self._a is None or self._b is None:
            return
        here = slice(slot * self.slots.rank, (slot + 1) * self.slots.rank)
        self._a.view(len(self.parts), -1, self.in_features)[:, here] = 0
        self._b[here] = 0
        if self._factors is not None:
            self._factors[slot] = 1

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., in] -> [..., out]."""
        y: torch.Tensor = self.base(x)
        mask, row_slots = self.slots.mask, self.slots.row_slots
        self.other_rows |= x.numel() // self.in_features != self.slots.rows
        if mask is None or row_slots is None or not (self._mine or self.slots.capturing):
            return y
        if self._a is None or self._b is None:  # captured without room for adapters
            return y
        flat, rows = x.reshape(-1, self.in_features), y.view(-1, self.out_features)
        factors = None if self.slots.capturing or not self.slots.with_factors else self._factors
        if factors is None and len(flat) <= low_rank.MOST_ROWS:
            low_rank.add(flat, self._a, self._b, row_slots, self.slots.ranks, self._ends, rows)
            return y
        # Chosen, not multiplied by zero: what is infinite in another's adapter would be NaN here.
        own = torch.where(mask[:, None], F.linear(flat, self._a).view(len(flat), len(self.parts), -1), 0)
        if factors is None:
            for part, columns in enumerate(self._columns):
                rows[:, columns].addmm_(own[:, part], self._b[:, columns])
            return y
        added = torch.cat([own[:, part] @ self._b[:, columns] for part, columns in enumerate(self._columns)], 1)
        bias = self.base.bias if self.base.bias is not None else 0.0
        scaled = (rows - bias + added) * factors[row_slots] + bias
        has_factors = (factors != 1).any(1)[row_slots][:, None]
        return torch.where(has_factors, scaled, rows + added).view_as(y)


def add_slots(model: nn.Module, slots: Slots, head: nn.Module | None) -> list[SlotLinear]:
    """Wrap every `nn.Linear` and `Conv1D` except the output layer; returns the wrappers."""
    layers = []
    for path, parent in list(model.named_modules()):
        for name, child in list(parent.named_children()):
            if type(child) in (nn.Linear, Conv1D) and child is not head:
                whole = f"{path}.{name}" if path else name
                outputs = child.weight.shape[1] if type(child) is Conv1D else child.weight.shape[0]
                wrapped = SlotLinear(child, [(whole, outputs)], slots)
                setattr(parent, name, wrapped)
                layers.append(wrapped)
    return layers
