"""The paged KV cache on the CPU. It stores the tensors; `BlockPool` tracks which request owns which block."""

from __future__ import annotations

from collections.abc import Hashable
from typing import TYPE_CHECKING

import torch

from engine.cpu import large_pages
from engine.cpu.kernels.emit import LANES, UNPAIRED
from engine.cpu.kernels.paged import paired_cache
from engine.process.memory import free_memory
from engine.shapes import AttentionSpec, spec_of

if TYPE_CHECKING:
    from engine.cpu.kernels.threads import Program

MIN_DEFAULT_BYTES = 64 << 20
MAX_DEFAULT_BYTES = 4 << 30


def whole_vectors(count: int) -> int:
    """`count` rounded up to whole vectors of the kernels."""
    return -(-count // LANES) * LANES


def block_bytes(specs: list[AttentionSpec], block_size: int, dtype: torch.dtype) -> int:
    """Bytes of one block over all layers."""
    lanes = whole_vectors(block_size)
    return sum(
        s.num_kv_heads * (s.key_dim * lanes + block_size * whole_vectors(s.value_dim)) * dtype.itemsize for s in specs
    )


def default_num_blocks(bytes_per_block: int) -> int:
    """The number of blocks that fit into 30 % of the free memory, between 64 MiB and 4 GiB."""
    budget = min(int(free_memory() * 0.3), MAX_DEFAULT_BYTES)
    return max(2, max(budget, MIN_DEFAULT_BYTES) // bytes_per_block)


class KVCache:
    """Per layer the keys `[blocks, heads, key_dim, lanes]` and the values `[blocks, heads, block_size, width]`.

    `lanes` is the block size and `width` the value dim, each rounded up to whole vectors; slot = block * block_size +
    offset. Keys lie transposed because one vector then holds one component of 16 keys
    (engine/cpu/kernels/attention.py).
    """

    def __init__(self, specs: list[AttentionSpec], num_blocks: int, block_size: int, dtype: torch.dtype) -> None:
        self.num_blocks, self.block_size, self.dtype = num_blocks, block_size, dtype
        self._specs = specs
        self.checked: set[tuple[int, ...]] = set()
        """(rows, rows of logits, rows of the last layer) of flat forward passes over this cache whose calls the kernels' checks have seen."""
        self.programs: dict[Hashable, Program] = {}
        """The recorded layers of such passes, by all that their calls depend on but for the attention plan."""
        self.lanes = whole_vectors(block_size)
        # Written once, so that the kernel allocates the memory now and not while serving.
        self.keys = [
            large_pages.empty((num_blocks, s.num_kv_heads, s.key_dim, self.lanes), dtype).zero_() for s in specs
        ]
        self.values = [
            large_pages.empty((num_blocks, s.num_kv_heads, block_size, whole_vectors(s.value_dim)), dtype).zero_()
            for s in specs
        ]

    @property
    def order(self) -> str:
        """How the numbers of a block lie beside each other: for each layer whether two components of a key, and two keys' values, are a pair."""
        pairs = (paired_cache(*layer) != UNPAIRED for layer in zip(self.keys, self.values, strict=True))
        return ", ".join("pairs" if each else "single" for each in pairs)

    def spec(self, layer: int) -> AttentionSpec:
        """The spec of layer `layer`; raises ShapeError for an unknown layer."""
        return spec_of(self._specs, layer)
