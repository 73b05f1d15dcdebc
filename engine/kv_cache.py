"""The keys and values of all sequences, in blocks. It stores and measures; who owns which block is the pool's business."""

from __future__ import annotations

from dataclasses import dataclass

import psutil
import torch

MIN_BYTES = 64 << 20
MAX_DEFAULT_BYTES = 4 << 30


@dataclass(frozen=True, slots=True)
class AttentionSpec:
    """One attention layer as the probe saw it called: KV heads, widths of key and value, scale, window, and whether
    its softmax is the plain one.
    """

    num_kv_heads: int
    key_dim: int
    value_dim: int
    scale: float | None
    window: int | None
    plain: bool


def block_bytes(specs: list[AttentionSpec], block_size: int, dtype: torch.dtype) -> int:
    """Bytes that one block takes over all layers."""
    return sum(block_size * s.num_kv_heads * (s.key_dim + s.value_dim) * dtype.itemsize for s in specs)


def default_num_blocks(bytes_per_block: int, requested_bytes: int, most_blocks: int) -> int:
    """How many blocks to make: `requested_bytes` worth, or by default 30 % of the free memory, 4 GiB at most.

    Never more than `most_blocks`, what the largest batch of the longest sequences can fill.
    """
    budget = requested_bytes or min(int(psutil.virtual_memory().available * 0.3), MAX_DEFAULT_BYTES)
    return max(2, min(max(budget, MIN_BYTES) // bytes_per_block, most_blocks + 1))


class KVCache:
    """Per layer two tensors `[num_blocks, block_size, num_kv_heads, dim]`; slot = block * block_size + offset."""

    def __init__(self, specs: list[AttentionSpec], num_blocks: int, block_size: int, dtype: torch.dtype) -> None:
        self.num_blocks, self.block_size = num_blocks, block_size
        # Written once, so that the memory is taken now and not while serving.
        self.keys = [self._tensor(s.num_kv_heads, s.key_dim, dtype) for s in specs]
        self.values = [self._tensor(s.num_kv_heads, s.value_dim, dtype) for s in specs]

    def _tensor(self, heads: int, dim: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(self.num_blocks, self.block_size, heads, dim, dtype=dtype).zero_()

    def write(self, layer: int, slots: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> None:
        """Store `[T, num_kv_heads, dim]` keys and values at `slots` `[T]` int64."""
        self.keys[layer].flatten(0, 1).index_copy_(0, slots, key)
        self.values[layer].flatten(0, 1).index_copy_(0, slots, value)

    def gather(self, layer: int, blocks: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Copies of `count` sequences' blocks, all of one number: two `[count, length, num_kv_heads, dim]`."""
        key = self.keys[layer].index_select(0, blocks)
        value = self.values[layer].index_select(0, blocks)
        return key.view(count, -1, *key.shape[2:]), value.view(count, -1, *value.shape[2:])

    def read(self, layer: int, blocks: list[int] | range, start: int, end: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of positions `start`..`end` of a sequence, `[length, num_kv_heads, dim]`.

        Consecutive blocks (a range) are a view, others a copy.
        """
        first, last = start // self.block_size, -(-end // self.block_size)
        offset, length = start - first * self.block_size, end - start
        if isinstance(blocks, range):
            begin = (blocks.start + first) * self.block_size + offset
            return (
                self.keys[layer].flatten(0, 1).narrow(0, begin, length),
                self.values[layer].flatten(0, 1).narrow(0, begin, length),
            )
        index = torch.tensor(blocks[first:last])
        key = self.keys[layer].index_select(0, index).flatten(0, 1).narrow(0, offset, length)
        return key, self.values[layer].index_select(0, index).flatten(0, 1).narrow(0, offset, length)
