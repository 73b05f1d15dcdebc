"""CUDA graphs for decode steps: captured once per batch size and length class, without and with adapters, replayed with new inputs in the same
buffers.

A step of many small kernels is bound by the host's launch rate; a graph is a single launch.
"""

from __future__ import annotations

import logging
from contextlib import contextmanager
from itertools import product
from typing import TYPE_CHECKING, Any

import torch

from engine.attention import attend_with
from engine.batch import fill_in
from engine.gpu.attention import DeviceAttention, DeviceKVCache, pinned
from engine.gpu.paged_attention import Plan, shared_memory, tile_rows

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from engine.backend import Forward
    from engine.batch import ForwardBatch
    from engine.gpu.lora import SlotLinear, Slots
    from engine.shapes import AttentionSpec


logger = logging.getLogger(__name__)

SPLITS = (1, 8, 32)
"""Numbers of pieces of contexts to capture, besides that of the longest: pieces that a context does not have cost little, but not
nothing.
"""


def capture_sizes(max_num_seqs: int) -> list[int]:
    """The numbers of rows to capture; a step uses the next larger one."""
    return sorted({n for n in (1, 2, 4, *range(8, max_num_seqs + 8, 8)) if n <= max_num_seqs} | {max_num_seqs})


class DecodeGraphs:
    """The graphs of one model. All share one set of buffers; a smaller graph reads their first rows."""

    def __init__(
        self,
        forward: Forward,
        specs: list[AttentionSpec],
        cache: DeviceKVCache,
        max_num_seqs: int,
        max_model_len: int,
        device: torch.device,
        slots: Slots,
        layers: list[SlotLinear],
    ) -> None:
        """`layers` take adapters, in `slots`; none: no steps with adapters are captured."""
        self._forward, self._cache, self._device = forward, cache, device
        self._adapters, self._layers = slots, [layer for layer in layers if not layer.other_rows]
        most = cache.num_splits(max_model_len)
        self._splits = sorted({*(n for n in SPLITS if n < most), most})
        blocks = -(-max_model_len // cache.block_size)

        def buffer(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
            return torch.zeros(*shape, dtype=dtype, device=device)

        self._numbers = buffer(3 * max_num_seqs, dtype=torch.int64)
        """A graph of n rows reads the first 3 n: their input ids, positions and slots."""
        self._counts = buffer(2 * max_num_seqs)
        """Likewise 2 n: the lengths of their sequences, and their tiles' sequences."""
        self._chosen = buffer(max_num_seqs, dtype=torch.int64)
        """The tokens of the step before."""
        self._tables, self._tile_start = buffer(max_num_seqs, blocks), buffer(max_num_seqs)
        self._host_tables = torch.zeros(max_num_seqs, blocks, dtype=torch.int32)
        self._blocks: list[list[int]] = [[] for _ in range(max_num_seqs)]
        """What each row of the tables has, which most steps leave as it is."""
        self._query_starts = torch.arange(max_num_seqs + 1, dtype=torch.int32, device=device)
        self._rows = torch.arange(max_num_seqs, device=device)
        self._host_rows = torch.arange(max_num_seqs)
        self._row_slots = torch.full((max_num_seqs,), slots.count, dtype=torch.int64, device=device)
        self._groups = {spec.num_heads // spec.num_kv_heads for spec in specs}
        self._sizes = capture_sizes(max_num_seqs)
        self._graphs: dict[tuple[int, int, bool], tuple[Callable[[], None], torch.Tensor]] = {}
        """By number of rows, number of pieces, and whether rows have adapters."""
        self._logits: torch.Tensor | None = None
        self._pool: Any = None

    def capture(self) -> None:
        """Capture all graphs, the largest first, so that smaller ones reuse its memory pool: those without adapters, then those with.
        Raises RuntimeError if the model reads from the device during a step; adapters alone may go without graphs.
        """
        self._capture_all(adapted=False)
        if not self._layers:
            return
        try:
            for layer in self._layers:
                layer.make_room()
            self._capture_all(adapted=True)
        except RuntimeError as error:
            logger.warning("decode with adapters runs without graphs: %s", error)
            self._layers = []
            self._graphs = {key: graph for key, graph in self._graphs.items() if not key[2]}

    def _capture_all(self, adapted: bool) -> None:
        for size, splits in product(reversed(self._sizes), reversed(self._splits)):
            self._pad(size)
            self._graphs[size, splits, adapted] = self._record(size, splits, adapted)

    def _record(self, size: int, splits: int, adapted: bool) -> tuple[Callable[[], None], torch.Tensor]:
        """The replay of one graph, and its logits."""
        with _no_waits():  # before the capture: one that fails leaves torch's stream and allocator in its midst
            logits = self._step(size, splits, adapted)
        if self._logits is None:  # one for all graphs, whose own results would stay in the pool
            self._logits = torch.empty_like(logits)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            self._logits[:size].copy_(self._step(size, splits, adapted))
        self._pool = self._pool or graph.pool()
        return graph.replay, self._logits[:size]

    def fits(self, batch: ForwardBatch) -> bool:
        """Whether a graph can run the batch: one token per sequence, not more sequences than captured, and no adapters with
        factors (or none at all, where no layer takes them).
        """
        count = len(batch.sequences)
        alone = count <= self._sizes[-1] and batch.sequences[-1].row + batch.sequences[-1].count == count
        factored = any(digest in self._adapters.with_factors for _, _, digest in batch.segments)
        if not alone or factored or (batch.segments and not self._layers):
            return False
        return bool(torch.equal(batch.logits_rows, self._host_rows[:count]))

    def run(self, batch: ForwardBatch) -> torch.Tensor:
        """Replay the batch's graph. Returns logits [sequences, V], which are valid until the next run."""
        count = len(batch.sequences)
        size = next(n for n in self._sizes if n >= count)
        lengths = [s.length for s in batch.sequences]
        self._set(size, batch, lengths)
        if batch.segments:
            self._put(self._row_slots[:size], self._adapters.slots_of(batch.segments, size))
        needed = self._cache.num_splits(max(lengths))
        replay, logits = self._graphs[size, next(n for n in self._splits if n >= needed), bool(batch.segments)]
        replay()
        return logits[:count]

    def _set(self, size: int, batch: ForwardBatch, lengths: list[int]) -> None:
        """Fill the first `size` rows; padding rows write to block 0."""
        count = len(lengths)
        numbers, counts = torch.zeros(3, size, dtype=torch.int64), torch.zeros(2, size, dtype=torch.int32)
        numbers[0, :count] = batch.input_ids[0, :count]
        numbers[1, :count] = batch.positions[0, :count]
        numbers[2, :count] = batch.slot_mapping[:count]
        counts[0, :count] = torch.tensor(lengths, dtype=torch.int32)
        counts[1, :count] = self._host_rows[:count]
        counts[1, count:] = -1
        self._put(self._numbers[: 3 * size], numbers.view(-1))
        self._put(self._counts[: 2 * size], counts.view(-1))
        if batch.chosen is not None:
            self._chosen[: len(batch.chosen)].copy_(batch.chosen)
        self._set_tables([s.blocks for s in batch.sequences])

    def _set_tables(self, tables: list[list[int]]) -> None:
        """Write the block tables of rows that have other blocks than in the step before."""
        changed = [row for row, blocks in enumerate(tables) if self._blocks[row] != blocks]
        for row in changed:
            self._blocks[row] = tables[row]
            self._host_tables[row, : len(tables[row])] = torch.tensor(tables[row], dtype=torch.int32)
        if changed:
            first, end, widest = changed[0], changed[-1] + 1, max(map(len, tables))
            self._put(self._tables[first:end, :widest], self._host_tables[first:end, :widest].contiguous())

    def _pad(self, size: int) -> None:
        """Let the first `size` rows be padding."""
        self._numbers[: 3 * size].zero_()
        self._counts[:size].zero_()
        self._counts[size : 2 * size].fill_(-1)

    def _put(self, target: torch.Tensor, numbers: torch.Tensor) -> None:
        target.copy_(pinned(numbers, self._device), non_blocking=True)

    def _step(self, size: int, splits: int, adapted: bool) -> torch.Tensor:
        dtype, room = self._cache.dtype, shared_memory(self._device)
        ids, positions, slots = self._numbers[: 3 * size].view(3, size)
        lengths, tile_sequence = self._counts[: 2 * size].view(2, size)
        plans = {
            group: Plan(
                tile_sequence, self._tile_start[:size], tile_rows(group, 1, dtype, room),
                self._query_starts[: size + 1], lengths, self._tables[:size], splits, self._cache.split_keys,
            )
            for group in self._groups
        }  # fmt: skip
        if adapted:
            self._adapters.begin_capture(self._row_slots[:size])
        else:
            self._adapters.begin_step((), size)
        try:
            with attend_with(DeviceAttention.captured(self._cache, slots, plans)):
                return self._forward(fill_in(ids, self._chosen)[None], positions[None], self._rows[:size])
        finally:
            self._adapters.end_step()


@contextmanager
def _no_waits() -> Iterator[None]:
    """Let operations that make the host wait for the device raise RuntimeError. It also compiles the step's kernels."""
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)
