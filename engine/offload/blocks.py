"""Copies whole blocks between a KV cache and rows of bytes. A row has the block's part of each layer's keys and values, in order.

Every device's cache keeps its tensors as lists `keys` and `values` with the block as their first dimension.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import torch

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence


COPY_BYTES = 32 << 20
"""The bytes that are copied at once: so much memory is needed beside the cache."""
T = TypeVar("T")


@dataclass(slots=True)
class HostRows:
    """Rows in host memory, which a device may still be writing."""

    rows: torch.Tensor
    """[n, bytes of a block] uint8."""
    written: torch.cuda.Event | None = None

    def content(self, row: int) -> memoryview:
        """The bytes of one row, as soon as the device has written them."""
        if self.written is not None:
            self.written.synchronize()
        return memoryview(self.rows[row].numpy())


class BlockCopier:
    """The blocks of one cache as bytes."""

    def __init__(self, cache: Any) -> None:
        """`cache` is a KV cache of a backend."""
        self._parts: list[torch.Tensor] = [
            tensor.view(tensor.shape[0], -1) for pair in zip(cache.keys, cache.values, strict=True) for tensor in pair
        ]
        self._sizes = [part.shape[1] * part.dtype.itemsize for part in self._parts]
        self.block_bytes: int = sum(self._sizes)
        self.blocks_at_once = max(1, COPY_BYTES // self.block_bytes)
        self.device = self._parts[0].device

    @torch.inference_mode()
    def read(self, blocks: Sequence[int]) -> torch.Tensor:
        """A copy of these blocks as rows, on the cache's device."""
        index = self._on_device(blocks)
        return torch.cat([part.index_select(0, index).view(torch.uint8) for part in self._parts], dim=1)

    @torch.inference_mode()
    def to_host(self, rows: torch.Tensor) -> HostRows:
        """The rows in host memory; the host does not wait for the device."""
        if self.device.type != "cuda":
            return HostRows(rows)
        host = torch.empty(rows.shape, dtype=torch.uint8, pin_memory=True)
        host.copy_(rows, non_blocking=True)
        written = torch.cuda.Event()
        written.record()
        return HostRows(host, written)

    @torch.inference_mode()
    def write(self, blocks: Sequence[int], rows: Sequence[torch.Tensor]) -> None:
        """Fill these blocks with rows in host memory."""
        for numbers in batched(range(len(blocks)), self.blocks_at_once):
            index = self._on_device([blocks[n] for n in numbers])
            together = torch.empty((len(numbers), self.block_bytes), dtype=torch.uint8, device=self.device)
            for place, number in enumerate(numbers):
                together[place].copy_(rows[number], non_blocking=True)
            for part, content in zip(self._parts, together.split(self._sizes, dim=1), strict=True):
                aligned = content.clone(memory_format=torch.contiguous_format)
                part.index_copy_(0, index, aligned.view(part.dtype))

    def _on_device(self, numbers: Sequence[int]) -> torch.Tensor:
        """The numbers on the cache's device; the host does not wait for the steps that the device still has to do."""
        index = torch.tensor(numbers, dtype=torch.int64)
        if self.device.type == "cuda":
            index = index.pin_memory()
        return index.to(self.device, non_blocking=True)


def batched(items: Sequence[T], count: int) -> Iterator[Sequence[T]]:
    """The items in parts of at most `count`."""
    return (items[start : start + count] for start in range(0, len(items), count))
