"""Adapters on a device by masked concatenation: two products over all slots, with the columns of other slots zeroed.

The shapes do not depend on the step's adapters, and nothing is sorted or gathered.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import nn
from transformers.pytorch_utils import Conv1D

from engine.adapters.failures import AdapterCode, AdapterError
from engine.adapters.peft import dora_factors
from engine.gpu.attention import to_device

if TYPE_CHECKING:
    from engine.adapters.peft import Adapter
    from engine.batch import Segments


@dataclass(slots=True)
class SlotWeights:
    """One adapter's weights for one layer: A [rank, in], B [rank, out], and factors [out] for DoRA."""

    a: torch.Tensor
    b: torch.Tensor
    factors: torch.Tensor | None


class Slots:
    """The adapters' slots and the current step's mask; shared by all layers of a model."""

    def __init__(self, count: int, rank: int, device: torch.device) -> None:
        self.count, self.rank, self.device = count, rank, device
        self.numbers: dict[str, int] = {}
        self.rows = 0
        """The rows of the current step."""
        self.mask: torch.Tensor | None = None
        """[T, slots * rank] bool: the columns of the row's slot; None in steps without adapters."""
        self.row_slots: torch.Tensor | None = None
        """[T] int64: the slot of each row, or `count` for rows without an adapter."""

    def take(self, digest: str) -> int:
        """Assign a slot to the adapter, unless it has one; returns the slot."""
        if digest not in self.numbers:
            self.numbers[digest] = min(set(range(self.count)) - set(self.numbers.values()))
        return self.numbers[digest]

    def begin_step(self, segments: Segments, rows: int) -> None:
        """Set the step's adapter mask; valid until `end_step`."""
        self.rows = rows
        if not segments:
            return
        of_row = torch.full((rows,), self.count)
        for first, number, digest in segments:
            of_row[first : first + number] = self.numbers[digest]
        self.row_slots = to_device(of_row, self.device)
        slot_of_column = torch.arange(self.count, device=self.device).repeat_interleave(self.rank)
        self.mask = self.row_slots[:, None] == slot_of_column

    def end_step(self) -> None:
        """Clear the step's adapter mask."""
        self.rows, self.mask, self.row_slots = 0, None, None


class SlotLinear(nn.Module):
    """A linear layer of the model, with the adapters in the slots."""

    def __init__(self, base: nn.Module, path: str, slots: Slots) -> None:
        super().__init__()
        weight = base.weight.t() if type(base) is Conv1D else base.weight
        self.base, self.slots = base, slots
        self.out_features, self.in_features = weight.shape
        self.parts = [(path, self.out_features)]
        self.other_rows = False
        self._mine: dict[str, int] = {}
        self._a: torch.Tensor | None = None
        self._b: torch.Tensor | None = None
        self._factors: torch.Tensor | None = None

    def _weight(self) -> torch.Tensor:
        weight: torch.Tensor = self.base.weight.t() if type(self.base) is Conv1D else self.base.weight
        return weight

    def make(self, adapter: Adapter) -> SlotWeights | None:
        """The adapter's weights for this layer, on the host (in pinned memory if there is a device). Raises AdapterError."""
        found = adapter.modules.get(self.parts[0][0])
        if found is None:
            return None
        factors = None
        if found.magnitude is not None:
            weight = self._weight().detach().float().cpu()
            factors = dora_factors(self.parts[0][0], found.magnitude, weight + found.b @ found.a)
        dtype = self._weight().dtype
        a, b = found.a.to(dtype), found.b.t().contiguous().to(dtype)
        if not all(bool(torch.isfinite(tensor).all()) for tensor in (a, b)):  # float16 has less room
            raise AdapterError(AdapterCode.NOT_FINITE, layer=self.parts[0][0])
        if self.slots.device.type == "cuda":
            a, b = a.pin_memory(), b.pin_memory()
        return SlotWeights(a, b, factors)

    def put(self, digest: str, weights: SlotWeights | None) -> None:
        slot = self.slots.take(digest)
        if weights is None:
            return
        self._mine[digest] = slot
        size, rank, weight = self.slots.count * self.slots.rank, self.slots.rank, self._weight()
        if self._a is None or self._b is None:
            self._a = weight.new_zeros(size, self.in_features)
            self._b = weight.new_zeros(size, self.out_features)
        here = slice(slot * rank, slot * rank + weights.a.shape[0])
        self._a[here].copy_(weights.a, non_blocking=True)
        self._b[here].copy_(weights.b, non_blocking=True)
        if weights.factors is not None:
            if self._factors is None:
                self._factors = weight.new_ones(self.slots.count + 1, self.out_features)
            self._factors[slot] = weights.factors.to(self._factors)

    def drop(self, digest: str) -> None:
        self.slots.numbers.pop(digest, None)
        slot = self._mine.pop(digest, None)
        if slot is None or self._a is None or self._b is None:
            return
        here = slice(slot * self.slots.rank, (slot + 1) * self.slots.rank)
        self._a[here] = 0
        self._b[here] = 0
        if self._factors is not None:
            self._factors[slot] = 1

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., in] -> [..., out]."""
        y: torch.Tensor = self.base(x)
        mask = self.slots.mask
        self.other_rows |= x.numel() // self.in_features != self.slots.rows
        if mask is None or self._a is None or self._b is None or not self._mine:
            return y
        flat = x.reshape(-1, self.in_features)
        # Chosen, not multiplied by zero: what is infinite in another's adapter would be NaN here.
        own = torch.where(mask, F.linear(flat, self._a), 0)
        added = (own @ self._b).view_as(y)
        if self._factors is None or self.slots.row_slots is None:
            return y + added
        bias = self.base.bias if self.base.bias is not None else 0.0
        scaled = (y - bias + added) * self._factors[self.slots.row_slots].view_as(y) + bias
        has_factors = (self._factors != 1).any(1)[self.slots.row_slots].view(*y.shape[:-1], 1)
        return torch.where(has_factors, scaled, y + added)


def add_slots(model: nn.Module, slots: Slots, head: nn.Module | None) -> list[SlotLinear]:
    """Wrap every `nn.Linear` and `Conv1D` except the output layer; returns the wrappers."""
    layers = []
    for path, parent in list(model.named_modules()):
        for name, child in list(parent.named_children()):
            if type(child) in (nn.Linear, Conv1D) and child is not head:
                wrapped = SlotLinear(child, f"{path}.{name}" if path else name, slots)
                setattr(parent, name, wrapped)
                layers.append(wrapped)
    return layers
