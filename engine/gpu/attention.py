"""The KV cache on a device, and the attention of one forward pass over it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from engine.gpu.layers import rotate_and_store
from engine.gpu.paged_attention import Parts, Plan, attend, keys_of_split, shared_memory, tile_rows, tiles
from engine.shapes import check_slots, check_tables, require, spec_of

if TYPE_CHECKING:
    from engine.attention import Options
    from engine.batch import ForwardBatch
    from engine.shapes import AttentionSpec


FEW_QUERIES = 8
"""Longer chunks of a prompt are not split: they have enough tiles, and partial results would take much memory."""


def pinned(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """The host tensor in pinned memory, which the device can read without blocking the host."""
    return tensor.pin_memory() if device.type == "cuda" else tensor


def to_device(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A copy on the device; the host does not wait for it."""
    return pinned(tensor, device).to(device, non_blocking=True)


class DeviceKVCache:
    """Per layer the keys [blocks, block size, heads, key dim] and the values, likewise. Block 0 is for padding rows."""

    order = "single"
    """How the numbers of a block lie beside each other: as their shape says."""

    def __init__(
        self, specs: list[AttentionSpec], num_blocks: int, block_size: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.num_blocks, self.block_size, self.dtype = num_blocks, block_size, dtype
        self.split_keys = keys_of_split(0)
        """The length of a piece of a context, in keys; set anew when the longest sequence is known."""
        self._specs = specs
        shape = (num_blocks, block_size)
        self.keys = [torch.zeros(*shape, s.num_kv_heads, s.key_dim, dtype=dtype, device=device) for s in specs]
        self.values = [torch.zeros(*shape, s.num_kv_heads, s.value_dim, dtype=dtype, device=device) for s in specs]

    def num_splits(self, longest: int) -> int:
        """The number of pieces of the longest context; pieces after a sequence's end have no weight."""
        return -(-longest // self.split_keys)

    def spec(self, layer: int) -> AttentionSpec:
        """The spec of layer `layer`; raises ShapeError for an unknown layer."""
        return spec_of(self._specs, layer)


def block_bytes(specs: list[AttentionSpec], block_size: int, dtype: torch.dtype) -> int:
    """Bytes of one block over all layers."""
    return sum(block_size * s.num_kv_heads * (s.key_dim + s.value_dim) * dtype.itemsize for s in specs)


class DeviceAttention:
    """Writes the new keys and values of a step, then attends."""

    def __init__(self, cache: DeviceKVCache, batch: ForwardBatch, device: torch.device) -> None:
        check_slots(batch.slot_mapping, cache.num_blocks * cache.block_size)
        for s in batch.sequences:
            check_tables(
                s.row, s.count, s.length, s.blocks, len(batch.slot_mapping), cache.block_size, cache.num_blocks
            )
        self.cache = cache
        self.slots = to_device(batch.slot_mapping, device)
        self._device, self._sequences = device, batch.sequences
        self._plans: dict[int, Plan] = {}
        self._parts: dict[tuple[int, int], Parts] = {}

    @classmethod
    def captured(cls, cache: DeviceKVCache, slots: torch.Tensor, plans: dict[int, Plan]) -> DeviceAttention:
        """Attention over the buffers that a captured graph reads at each replay."""
        made = cls.__new__(cls)
        made.cache, made.slots, made._plans, made._parts = cache, slots, plans, {}
        return made

    @classmethod
    def of_padding(
        cls, cache: DeviceKVCache, groups: set[int], rows: int, splits: int, device: torch.device
    ) -> DeviceAttention:
        """Attention of `rows` padding rows, as if they were a chunk over a context of so many pieces: it computes nothing, but compiles
        the kernel for such steps.
        """
        none = torch.full((1,), -1, dtype=torch.int32, device=device)
        starts, tables = torch.zeros(2, dtype=torch.int32, device=device), none[None]
        room = shared_memory(device)
        plans = {
            group: Plan(
                none, none, tile_rows(group, rows, cache.dtype, room), starts, none, tables, splits, cache.split_keys
            )
            for group in groups
        }
        return cls.captured(cache, torch.zeros(rows, dtype=torch.int64, device=device), plans)

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
        spec.check(layer, query, key, value, len(self.slots))
        keys, values = self.cache.keys[layer], self.cache.values[layer]
        keys.view(-1, *keys.shape[2:]).index_copy_(0, self.slots, key.transpose(0, 1).to(keys.dtype))
        values.view(-1, *values.shape[2:]).index_copy_(0, self.slots, value.transpose(0, 1).to(values.dtype))
        by_token = query.transpose(0, 1)
        if by_token.stride(2) != 1:
            by_token = by_token.contiguous()
        if out is None:  # zeros, because padding rows are in no tile, and the layers' results for them must stay finite
            out = query.new_zeros(query.shape[1], query.shape[0], spec.value_dim)
        self._attend(by_token, keys, values, options, spec, out)
        return out

    def rotate_and_attend(
        self,
        layer: int,
        qkv: torch.Tensor,
        cosines: torch.Tensor,
        sines: torch.Tensor,
        norms: tuple[torch.Tensor, torch.Tensor, float] | None,
        options: Options,
        out: torch.Tensor,
    ) -> None:
        """The same from the results of one product, qkv [T, (H + 2 HK) D], before their norms and rotation, as for
        `rotate_and_store`. `out` [T, H, D] keeps what it has in padding rows. Raises ShapeError if the call differs from the
        recorded one.
        """
        spec = self.cache.spec(layer)
        heads, dim = (spec.num_heads, spec.num_kv_heads), spec.key_dim
        width = (heads[0] + 2 * heads[1]) * dim
        require(
            spec.value_dim == dim and qkv.shape == (len(self.slots), width),
            f"[T, {width}] and T slots",
            qkv,
            self.slots,
        )
        keys, values = self.cache.keys[layer], self.cache.values[layer]
        rotate_and_store(qkv, heads, cosines, sines, norms, self.slots, keys, values)
        query = qkv[:, : heads[0] * dim].unflatten(1, (heads[0], dim))
        self._attend(query, keys, values, options, spec, out)

    def _attend(
        self,
        query: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        options: Options,
        spec: AttentionSpec,
        out: torch.Tensor,
    ) -> None:
        plan = self._plan(spec.num_heads // spec.num_kv_heads)
        parts = self._parts_of(spec, plan.splits) if plan.splits > 1 else None
        attend(plan, query, keys, values, options.scale, spec.window, options.softcap, options.sinks, out, parts)

    def _parts_of(self, spec: AttentionSpec, splits: int) -> Parts:
        """Those of all layers with so many heads of this width."""
        like = (spec.num_heads, spec.value_dim)
        if like not in self._parts:
            self._parts[like] = Parts.of(len(self.slots), spec.num_heads, splits, spec.value_dim, self.slots.device)
        return self._parts[like]

    def _plan(self, group: int) -> Plan:
        if group not in self._plans:
            self._plans[group] = self._make(group)
        return self._plans[group]

    def _make(self, group: int) -> Plan:
        counts = [s.count for s in self._sequences]
        rows = tile_rows(group, max(counts), self.cache.dtype, shared_memory(self._device))
        sequence, start = tiles(counts, group, rows)
        starts = [0, *(s.row + s.count for s in self._sequences)]
        longest = max(len(s.blocks) for s in self._sequences)
        tables = [s.blocks + [0] * (longest - len(s.blocks)) for s in self._sequences]
        lengths = [s.length for s in self._sequences]

        def put(numbers: list[int] | list[list[int]]) -> torch.Tensor:
            return to_device(torch.tensor(numbers, dtype=torch.int32), self._device)

        splits = self.cache.num_splits(max(lengths)) if max(counts) <= FEW_QUERIES else 1
        return Plan(
            put(sequence), put(start), rows, put(starts), put(lengths), put(tables), splits, self.cache.split_keys
        )
