"""Whole blocks of a KV cache as bytes, on any device. It reads and writes what it is told to and knows no requests."""

from __future__ import annotations

from hashlib import sha256
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    Bytes = NDArray[np.uint8]


class CacheBlocks:
    """The blocks of a KV cache of any backend: a list of `keys` and one of `values`, one tensor a layer, by block."""

    def __init__(self, cache: Any) -> None:
        tensors = [tensor for pair in zip(cache.keys, cache.values, strict=True) for tensor in pair]
        self.block_size: int = cache.block_size
        self.dtype = str(cache.dtype).removeprefix("torch.")
        shapes = [tuple(tensor.shape[1:]) for tensor in tensors]
        device = tensors[0].device.type
        self.layout = sha256(repr((device, self.block_size, shapes, cache.order)).encode()).hexdigest()
        """A digest of how a block lies in memory."""
        self._rows = [tensor.view(tensor.shape[0], -1).view(torch.uint8) for tensor in tensors]
        self._on_host = device == "cpu"
        self.block_bytes = sum(rows.shape[1] for rows in self._rows)

    def read(self, blocks: Sequence[int], into: Bytes | None = None) -> Bytes:
        """A copy of the blocks, tensor by tensor: `len(blocks) * block_bytes` bytes, at the begin of `into` if it is given."""
        count = len(blocks) * self.block_bytes
        out = np.empty(count, np.uint8) if into is None else into[:count]
        for rows, part in zip(self._rows, self._parts(out, len(blocks)), strict=True):
            if self._on_host:
                np.take(rows.numpy(), blocks, axis=0, out=part, mode="clip")  # "raise" would make another copy
            else:
                torch.from_numpy(part).copy_(rows[list(blocks)])
        return out

    def write(self, blocks: Sequence[int], data: Bytes, first: int, count: int) -> None:
        """Overwrite the blocks with those from number `first` on of the `count` blocks that `read` returned."""
        end = first + len(blocks)
        for rows, part in zip(self._rows, self._parts(data, count), strict=True):
            if self._on_host:
                rows.numpy()[list(blocks)] = part[first:end]
            else:
                rows[list(blocks)] = torch.from_numpy(part[first:end]).to(rows.device)

    def _parts(self, data: Bytes, count: int) -> list[Bytes]:
        """The part of each tensor in the bytes of `count` blocks."""
        parts, start = [], 0
        for rows in self._rows:
            end = start + count * rows.shape[1]
            parts.append(data[start:end].reshape(count, -1))
            start = end
        return parts
