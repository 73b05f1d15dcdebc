"""Adapters on the CPU: their packed weights in each layer, and their products in a step.

A step's rows are grouped into segments of one adapter each. An adapter takes two small products per segment and layer: the
first is a kernel call for all segments; the second is the initial value of the layer's own product, instead of its bias.
"""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np
import torch

from engine.adapters.peft import dora_factors
from engine.cpu.kernels import ops
from engine.cpu.kernels.emit import LANES
from engine.cpu.kernels.lora import FIELDS, RANKS
from engine.cpu.kernels.tiles import PANEL
from engine.shapes import require

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from numpy.typing import NDArray

    from engine.adapters.peft import Adapter, LoraWeights
    from engine.batch import Segments

LEAST_FACTOR = 1e-30
"""Of a column with a bias. A smaller one, as of a magnitude of 0, counts as this: bias / factor stays finite, and of the products nothing is left
beside the bias.
"""

_segments: Segments = ()
_rows = 0
_changes = 0
"""How often adapters were put into slots or removed."""


@contextmanager
def adapters_of(segments: Segments, rows: int) -> Iterator[None]:
    """Apply the adapters of these segments in the layers called inside the block; `rows`: the number of rows that they get."""
    global _segments, _rows
    before, _segments, _rows = (_segments, _rows), segments, rows
    try:
        yield
    finally:
        _segments, _rows = before


@dataclass(frozen=True, slots=True)
class _Runs:
    """A step's rows in runs of one adapter, or of none (None): places [N, 2] int64 of first rows and numbers of rows."""

    places: NDArray[np.int64]
    digests: list[str | None]


@lru_cache(maxsize=4)
def _runs_of(segments: Segments, rows: int) -> _Runs:
    """The runs of a step, which all its layers share."""
    places: list[tuple[int, int]] = []
    digests: list[str | None] = []
    done = 0
    for first, count, digest in segments:
        if first > done:
            places.append((done, first - done))
            digests.append(None)
        places.append((first, count))
        digests.append(digest)
        done = first + count
    if done < rows:
        places.append((done, rows - done))
        digests.append(None)
    return _Runs(np.array(places, np.int64).reshape(-1, 2), digests)


def current() -> tuple[Segments, int]:
    """What the kernel calls of a step depend on as to adapters: the segments, and how often the slots have changed."""
    return _segments, _changes


@dataclass(slots=True)
class PackedLora:
    """One adapter's weights for one layer: A as `ops.pack_ranks` packs it, and B packed as the layer's weight, [panels, depth, 32].

    `ranks` are A's rows, those that fill it up included.

    `halves` [panels, 2] int64 says which of A's rows, `depth` from there on, belong to each 16 columns (-1: none do).
    For DoRA `factors` [width] float32 scales each output column, bias apart, and `start` [width] is bias / factors.
    """

    a: torch.Tensor
    ranks: int
    b: torch.Tensor
    halves: torch.Tensor
    factors: torch.Tensor | None
    start: torch.Tensor | None


class LoraLayer:
    """The adapters of one packed layer, which may combine several of the model's layers (q, k and v; gate and up)."""

    def __init__(
        self,
        parts: list[tuple[str, int]],
        in_features: int,
        dtype: torch.dtype,
        pack: Callable[[torch.Tensor], torch.Tensor],
        dense: Callable[[], torch.Tensor],
        bias: torch.Tensor | None,
    ) -> None:
        """`parts`: (path, outputs) in the order of the packed weight; `pack` packs [outputs, *] as the weight is
        packed; `dense` gives the weight [outputs, in] back; bias is the layer's own [width] float32.
        """
        self.parts, self.in_features, self.dtype, self.pack, self.dense = parts, in_features, dtype, pack, dense
        self.bias = bias
        self.other_rows = False
        """Whether the layer was called with other rows than the step's, so that their adapters are unknown."""
        numbers = [torch.full((out,), number, dtype=torch.float32) for number, (_, out) in enumerate(parts)]
        packed = pack((torch.cat(numbers) + 1)[:, None]) if parts else torch.zeros(0)
        halves = packed.flatten().view(-1, 2, LANES).long() - 1  # columns that fill up the last panel are -1
        self._part_of_half = halves.amax(2)
        self._mixes_parts = bool(((halves != self._part_of_half[:, :, None]) & (halves >= 0)).any())
        self._weights: dict[str, PackedLora] = {}
        self._made: tuple[tuple[Segments, int], ops.LoraSegments | None] | None = None
        self._numbers: dict[str | None, int] = {}
        """Each adapter's row of the following table; row 0 is no adapter."""
        self._table = np.zeros((1, FIELDS), np.int64)
        """As `engine.cpu.kernels.lora.FIELDS`, but for the rows of a step."""
        self._factor_addresses = np.zeros(1, np.int64)

    def make(self, adapter: Adapter) -> PackedLora | None:
        """Pack the adapter for this layer; None if it does not adapt the layer. Changes no state, so any thread may
        call it. Raises AdapterError.
        """
        found = [adapter.modules.get(path) for path, _ in self.parts]
        if all(weights is None for weights in found):
            return None
        for (path, _), weights in zip(self.parts, found, strict=True):
            if weights is not None:
                weights.narrowed(path, self.dtype)
        packed = self._stacked(found) if self._mixes_parts else self._side_by_side(found)
        factors = self._factors(found)
        start = None
        if factors is not None and self.bias is not None:
            factors = torch.where(factors.abs() < LEAST_FACTOR, LEAST_FACTOR, factors)
            start = self.bias / factors
        a, b, halves = packed
        packed_a = ops.pack_ranks(a.to(self.dtype))
        ranks = packed_a.numel() // self.in_features
        made = PackedLora(packed_a, ranks, self.pack(b.to(self.dtype)), halves, factors, start)
        width = made.b.shape[0] * PANEL
        require(
            a.shape[1] == self.in_features
            and made.halves.shape == (made.b.shape[0], 2)
            and int(halves.max()) + made.b[0].numel() // PANEL <= a.shape[0]
            and all(part is None or part.numel() == width for part in (factors, start)),
            "an adapter does not fit its layer",
            made.a, made.b, made.halves, factors, start,
        )  # fmt: skip
        return made

    def _side_by_side(self, found: list[LoraWeights | None]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Every part's B in its own columns, all as deep as the deepest, each reading its own rows of A."""
        depth = max(w.a.shape[0] for w in found if w is not None)
        depth += depth % 2  # the kernels pair bfloat16 numbers
        a = torch.zeros(depth * sum(w is not None for w in found), self.in_features)
        b = torch.zeros(sum(out for _, out in self.parts), depth)
        offsets, row, rank = [], 0, 0
        for weights, (_, out) in zip(found, self.parts, strict=True):
            offsets.append(-1 if weights is None else rank)
            if weights is not None:
                size = weights.a.shape[0]
                a[rank : rank + size], b[row : row + out, :size] = weights.a, weights.b
                rank += depth
            row += out
        halves = torch.tensor([*offsets, -1])[self._part_of_half]
        # Where one half of a panel has nothing, its B is zero and it may read what the other half reads.
        return a, b, torch.where(halves < 0, halves.flip(1), halves).contiguous()

    def _stacked(self, found: list[LoraWeights | None]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Where 16 columns belong to several parts: one B of all ranks, zero outside of each part's own."""
        depth = sum(w.a.shape[0] for w in found if w is not None)
        depth += depth % 2
        a = torch.zeros(depth, self.in_features)
        b = torch.zeros(sum(out for _, out in self.parts), depth)
        row = rank = 0
        for weights, (_, out) in zip(found, self.parts, strict=True):
            if weights is not None:
                size = weights.a.shape[0]
                a[rank : rank + size], b[row : row + out, rank : rank + size] = weights.a, weights.b
                rank += size
            row += out
        return a, b, torch.zeros_like(self._part_of_half)

    def _factors(self, found: list[LoraWeights | None]) -> torch.Tensor | None:
        """DoRA: magnitude / norm of each row of W + B A, in the order of the packed columns; 1 elsewhere."""
        if not any(w is not None and w.magnitude is not None for w in found):
            return None
        dense, row, columns = self.dense().float(), 0, []
        for weights, (path, out) in zip(found, self.parts, strict=True):
            if weights is None or weights.magnitude is None:
                columns.append(torch.ones(out))
            else:
                combined = dense[row : row + out] + weights.b @ weights.a
                columns.append(dora_factors(path, weights.magnitude, combined))
            row += out
        # As a weight of one input, in float32, so that the columns come into the order of the packed weight.
        return self.pack(torch.cat(columns)[:, None]).flatten()

    def put(self, digest: str, weights: PackedLora | None) -> None:
        """Put the adapter, packed by `make`, into a slot. Called only between steps."""
        if weights is not None:
            self._weights[digest] = weights
        self._changed()

    def drop(self, digest: str) -> None:
        """Remove the adapter from its slot. Called only between steps."""
        self._weights.pop(digest, None)
        self._changed()

    def _changed(self) -> None:
        """Write down what the kernels read of each adapter, which is the same in all steps but for the rows."""
        global _changes
        _changes += 1
        self._made = None
        self._numbers = {digest: number for number, digest in enumerate(self._weights, start=1)}
        bias = 0 if self.bias is None else self.bias.data_ptr()
        table, factors = [[0, 0, 0, 0, 0, 0, 0, bias]], [0]
        for weights in self._weights.values():
            start = bias if weights.start is None else weights.start.data_ptr()
            depth = weights.b[0].numel() // PANEL
            a, b, halves = (each.data_ptr() for each in (weights.a, weights.b, weights.halves))
            table.append([0, 0, a, weights.ranks, b, depth, halves, start])
            factors.append(0 if weights.factors is None else weights.factors.data_ptr())
        self._table, self._factor_addresses = np.array(table), np.array(factors)

    def segments(self, rows: int) -> ops.LoraSegments | None:
        """The current step's adapters in this layer, for a product of [rows, in]; None if there are none."""
        self.other_rows |= rows != _rows
        if not _segments or not self._weights:
            return None
        if rows != _rows:
            raise RuntimeError(f"{self.parts} was called with {rows} rows in a step of {_rows}")
        if self._made is None or self._made[0] != (_segments, rows):
            self._made = ((_segments, rows), self._make(rows))
        return self._made[1]

    def _make(self, rows: int) -> ops.LoraSegments | None:
        runs = _runs_of(_segments, rows)
        which = [self._numbers.get(digest, 0) for digest in runs.digests]
        table = self._table[which]
        ranks = int(table[:, RANKS].max())
        if not ranks:
            return None
        table[:, :2] = runs.places
        factors = self._factor_addresses[which]
        by_row = torch.from_numpy(factors.repeat(runs.places[:, 1])) if factors.any() else None
        return ops.LoraSegments(torch.from_numpy(table), ranks, by_row, rows)
