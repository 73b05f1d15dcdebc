"""The attention of one forward pass over the CPU's KV cache."""

from __future__ import annotations

from typing import TYPE_CHECKING

from engine.cpu.kernels.checks import known
from engine.cpu.kernels.paged import AttentionPlan, attend, write_kv
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
        self._plan = AttentionPlan(
            [(s.row, s.count, s.length, s.blocks) for s in batch.sequences],
            cache.block_size,
            cache.lanes,
            rows=len(self.slots),
            num_blocks=cache.num_blocks,
        )
        check_slots(self.slots, cache.num_blocks * cache.block_size)

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
        keys, values = self.cache.keys[layer], self.cache.values[layer]
        write_kv(key, value, self.slots, keys, values)
        if out is None:
            out = keys.new_empty(query.shape[1], query.shape[0], value.shape[2])
        if self.rows < query.shape[1]:
            out[self.rows :] = 0  # padding
        attend(self._plan, query, keys, values, out, options.scale, spec.window, options.softcap, options.sinks)
        return out
