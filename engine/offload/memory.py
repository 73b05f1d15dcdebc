"""The host-memory tier of a device: one array of blocks in memory that the device can read. It has no threads.

Copies to and from it run on the device's stream, in order: a row that is overwritten has been read before.
"""

from __future__ import annotations

import logging
import weakref
from collections import OrderedDict
from contextlib import suppress
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

logger = logging.getLogger(__name__)


def _unregister(rows: torch.Tensor) -> None:
    """End the registration of pinned memory, before it is freed."""
    torch.cuda.cudart().cudaHostUnregister(rows.data_ptr())


class MemoryTier:
    """The blocks that fit into `limit_bytes`, the least recently used of which goes first."""

    def __init__(self, limit_bytes: int, block_bytes: int, device: torch.device) -> None:
        self._block_bytes = block_bytes
        self._rows = torch.empty((limit_bytes // block_bytes, block_bytes), dtype=torch.uint8)
        if device.type == "cuda" and len(self._rows):
            # Not `pin_memory`, which rounds up to a power of two.
            error = int(torch.cuda.cudart().cudaHostRegister(self._rows.data_ptr(), self._rows.numel(), 0))
            if error:
                logger.warning("the memory of kv_offload_memory_bytes is not pinned (error %d): copies are slow", error)
                with suppress(RuntimeError):  # CUDA keeps the error until the next kernel, which raises it
                    torch.zeros(1, device=device)
            else:
                weakref.finalize(self, _unregister, self._rows)
        self._row_of: OrderedDict[bytes, int] = OrderedDict()
        self._free = list(range(len(self._rows)))
        self.hits = self.stored = self.evictions = 0

    def __contains__(self, digest: bytes) -> bool:
        return digest in self._row_of

    @property
    def total_bytes(self) -> int:
        """Bytes of the blocks that are held."""
        return len(self._row_of) * self._block_bytes

    def store(self, digests: Sequence[bytes], rows: torch.Tensor) -> None:
        """Keep blocks: the rows of `rows`, in the order of `digests`; the host does not wait for the device."""
        for digest, row in zip(digests, rows, strict=True):
            if digest in self._row_of or not len(self._rows):
                continue
            if not self._free:
                self._free.append(self._row_of.popitem(last=False)[1])
                self.evictions += 1
            place = self._free.pop()
            self._rows[place].copy_(row, non_blocking=True)
            self._row_of[digest] = place
            self.stored += 1

    def get(self, digest: bytes) -> torch.Tensor | None:
        """The block's bytes, until the next `store`."""
        place = self._row_of.get(digest)
        return None if place is None else self._rows[place]

    def touch(self, digests: Iterable[bytes]) -> None:
        """Note that these blocks were used."""
        for digest in digests:
            if digest in self._row_of:
                self._row_of.move_to_end(digest)
