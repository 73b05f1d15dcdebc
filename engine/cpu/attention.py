"""The attention of one forward pass over the CPU's KV cache."""

from __future__ import annotations

from typing import TYPE_CHECKING

from engine.cpu.kernels.checks import known
from engine.cpu.kernels.paged import AttentionPlan, attend, write_kv
from engine.cpu.wanted_rows import wanted_rows
from engine.shapes import check_slots

if TYPE_CHECKING:
    import torch

    from engine.attention import Options
    from engine.batch import ForwardBatch
    from engine.cpu.kernels.threads import Program
    from engine.cpu.kv_cache import KVCache


class PagedAttention:
    """Writes the new keys and values of a step, then attends."""

    def __init__(self, cache: KVCache, batch: ForwardBatch) -> None:
        self.cache, self.slots = cache, batch.slot_mapping
        self.rows = sum(s.count for s in batch.sequences)
        self._plan = self._planned([(s.row, s.count, s.length, s.blocks) for s in batch.sequences], len(self.slots))
        self.wanted = wanted_rows(batch)
        """The rows to which the last layer may keep."""
        check_slots(self.slots, cache.num_blocks * cache.block_size)

    def _planned(self, sequences: list[tuple[int, int, int, list[int]]], rows: int) -> AttentionPlan:
        cache = self.cache
        return AttentionPlan(sequences, cache.block_size, cache.lanes, rows=rows, num_blocks=cache.num_blocks)

    def change(self, program: Program, heads: int) -> None:
        """Let a program that was recorded over this cache, in layers of `heads` query heads of one shape, work for this
        step.
        """
        self._plan.change(program, self.slots, heads, self.cache.keys[0], self.cache.values[0])

    def attend(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        options: Options,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Raises ShapeError if the call differs from the recorded one."""
        spec = self.cache.spec(layer)
        if not known():
            spec.check(layer, query, key, value, len(self.slots))
        keys, values = self.store(layer, key, value)
        if out is None:
            out = keys.new_empty(query.shape[1], query.shape[0], value.shape[2])
        if self.rows < query.shape[1]:
            out[self.rows :] = 0  # padding
        attend(self._plan, query, keys, values, out, options.scale, spec.window, options.softcap, options.sinks)
        return out

    def store(self, layer: int, key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Write the step's key [HK, T, D] and value [HK, T, DV]. Returns the layer's whole cache."""
        keys, values = self.cache.keys[layer], self.cache.values[layer]
        write_kv(key, value, self.slots, keys, values)
        return keys, values

    def attend_wanted(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        options: Options,
        out: torch.Tensor,
    ) -> None:
        """As `attend`, with queries and `out` of the wanted rows only, and the keys and values of all."""
        assert self.wanted is not None
        keys, values = self.store(layer, key, value)
        plan, window = self._planned(self.wanted.sequences, len(self.wanted.rows)), self.cache.spec(layer).window
        attend(plan, query, keys, values, out, options.scale, window, options.softcap, options.sinks)
