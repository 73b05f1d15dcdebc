"""Memory in large pages for what every step reads: packed weights and the KV cache.

With few sequences a step is as fast as memory is read, and with pages of 4 KiB the processor spends a notable part of that on looking
up addresses, more so in a virtual machine. Linux gives large pages where they are asked for ("madvise", its usual setting); elsewhere
this is memory like any other.
"""

from __future__ import annotations

import math
import mmap
from contextlib import suppress
from threading import Lock
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

PAGE_BYTES = 2 << 20
CHUNK_BYTES = 64 << 20
"""Tensors smaller than this share a mapping, which is returned to the system when the last of them is gone."""
ALIGNMENT = 64

_lock = Lock()
_chunk = torch.empty(0, dtype=torch.uint8)
"""What is left of the mapping that the next small tensor comes from."""


def empty(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """Zeros that use no memory before they are written. Raises OSError if the system has none."""
    global _chunk
    size = math.prod(shape) * dtype.itemsize
    room = -(-size // ALIGNMENT) * ALIGNMENT
    if room >= CHUNK_BYTES:
        memory = _mapping(room)
    else:
        with _lock:
            if room > _chunk.numel():
                _chunk = _mapping(CHUNK_BYTES)
            memory, _chunk = _chunk[:room], _chunk[room:]
    return memory[:size].view(dtype).view(*shape)


def moved(tensor: torch.Tensor) -> torch.Tensor:
    """A contiguous copy."""
    target = empty(tensor.shape, tensor.dtype)
    target.copy_(tensor)
    return target


def _mapping(size: int) -> torch.Tensor:
    """Zeros that begin with a large page. The mapping ends with the last tensor that views it."""
    if not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.zeros(size, dtype=torch.uint8)
    # Shared memory, the default, has a setting of its own that is usually "never".
    memory = mmap.mmap(-1, size + PAGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError):  # a kernel that was built without large pages
        memory.madvise(mmap.MADV_HUGEPAGE)
    whole = torch.frombuffer(memory, dtype=torch.uint8)
    begin = -whole.data_ptr() % PAGE_BYTES
    return whole[begin : begin + size]
