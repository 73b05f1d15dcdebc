"""KV offload as the engine sees it: blocks are copied to the tiers when they are full, and come back into free blocks.

The engine's thread makes all calls, and no call waits for a disk. A block that is lost is computed again; it changes no output.
"""

from __future__ import annotations

import logging
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING
from weakref import WeakValueDictionary

import torch

from engine.offload.blocks import BlockCopier, batched
from engine.offload.disk import DiskTier, Staged
from engine.offload.folder import BlockFolder, prepare_folder
from engine.offload.identity import identity_of
from engine.offload.memory import MemoryTier
from engine.offload.stats import OffloadStats, TierStats

if TYPE_CHECKING:
    from collections.abc import Container, Sequence

    from engine.block_pool import BlockPool
    from engine.config import EngineConfig
    from engine.models.prepared import Prepared

logger = logging.getLogger(__name__)

STAGED_BYTES = 512 << 20
"""Bytes that may be read from disk before their requests start."""


class Offload:
    """The tiers of one KV cache."""

    def __init__(self, pool: BlockPool, copier: BlockCopier, memory: MemoryTier | None, disk: DiskTier | None) -> None:
        """At least one tier."""
        self._pool, self._copier, self._memory, self._disk = pool, copier, memory, disk
        self._staged: WeakValueDictionary[bytes, Staged] = WeakValueDictionary()
        """The blocks that requests wait for, once each."""
        self.late = 0
        """Requests that were computed because their blocks came too late."""
        pool.filled = []

    @property
    def blocks_at_once(self) -> int:
        """The most blocks that should come back in one step beside running sequences, which takes some milliseconds."""
        return self._copier.blocks_at_once

    def forget_filled(self) -> None:
        """Keep nothing of a step that failed: its blocks are free, and will be overwritten."""
        self._pool.filled = []

    def save(self) -> None:
        """Copy the blocks that the last step filled. Called before the next step is scheduled, which may overwrite them."""
        filled, self._pool.filled = self._pool.filled, []
        if not filled:
            return
        new = dict(filled)
        to_memory = [d for d in new if self._memory is not None and d not in self._memory]
        to_disk = [d for d in new if self._disk is not None and self._disk.wants(d)]
        if self._disk is not None:
            # The first blocks of a prompt come last here, and later ones are found through them alone.
            to_disk = to_disk[::-1][: self._disk.room(len(to_disk))]
        digests = list(dict.fromkeys([*to_memory, *to_disk]))
        wanted = set(to_disk)
        try:
            for part in batched(digests, self._copier.blocks_at_once):
                self._store(part, self._copier.read([new[digest] for digest in part]), wanted)
        except RuntimeError:  # no memory for the copy, on the device or the host: only the tiers lack the blocks
            logger.exception("blocks were not kept")

    def _store(self, digests: Sequence[bytes], rows: torch.Tensor, to_disk: Container[bytes]) -> None:
        """Give the rows to the tiers: to memory those that it lacks, to disk the wanted ones."""
        if self._memory is not None:
            self._memory.store(digests, rows)
        kept = [number for number, digest in enumerate(digests) if digest in to_disk]
        if self._disk is not None and kept:
            host = self._copier.to_host(rows)
            for number in kept:
                self._disk.store(digests[number], host, number)

    def find(self, chain: Sequence[bytes], cached: int) -> list[Staged]:
        """The blocks of `chain` after its first `cached` ones, which the prefix cache has, as far as the tiers have them. What is
        on disk begins to be read.
        """
        known = chain[:cached]
        for tier in (self._memory, self._disk):
            if tier is not None:
                tier.touch(known)
        found = []
        room = STAGED_BYTES // self._copier.block_bytes - len(self._staged)
        for digest in takewhile(self._has, chain[cached:]):
            staged = self._staged.get(digest)
            if staged is None:
                staged = Staged(digest)
                if self._memory is not None and digest in self._memory:
                    staged.done = True
                elif self._disk is not None:
                    if room <= 0:
                        break
                    room -= 1
                    self._staged[digest] = staged
                    self._disk.fetch(staged)
            found.append(staged)
        return found

    def bring(self, chain: Sequence[bytes], found: Sequence[Staged]) -> None:
        """Put `found`, the last of `chain`, into free blocks of the prefix cache, as far as they can be had."""
        start = len(chain) - len(found)
        if len(self._pool.match(chain[:start])) < start:
            return  # what comes before them was evicted meanwhile
        rows: dict[bytes, torch.Tensor] = {}
        in_memory = set()
        for staged in found:
            row = None if self._memory is None else self._memory.get(staged.digest)
            if row is not None:
                in_memory.add(staged.digest)
            elif staged.content is not None:
                row = torch.frombuffer(staged.content, dtype=torch.uint8)
            else:
                break
            rows[staged.digest] = row
        blocks = self._pool.insert(chain[: start + len(rows)])
        if not blocks:
            return
        try:
            self._copier.write(list(blocks.values()), [rows[digest] for digest in blocks])
        except RuntimeError:  # as above; the blocks are computed instead
            logger.exception("blocks did not come back")
            self._pool.discard(blocks.values())
            return
        from_memory = len(in_memory & blocks.keys())
        if self._memory is not None:
            self._memory.hits += from_memory
            self._memory.touch(blocks)
        if self._disk is not None:
            self._disk.hits += len(blocks) - from_memory

    def stats(self) -> OffloadStats:
        """The tiers' gauges and counters."""
        stats, memory, disk = OffloadStats(late=self.late), self._memory, self._disk
        if memory is not None:
            stats.memory = TierStats(memory.total_bytes, memory.hits, memory.stored, memory.evictions)
        if disk is not None:
            stats.disk = TierStats(disk.folder.total_bytes, disk.hits, disk.stored, disk.folder.evictions)
            stats.damaged, stats.dropped, stats.failures = disk.folder.damaged, disk.dropped, disk.failures
        return stats

    def close(self) -> None:
        """Stop the threads."""
        if self._disk is not None:
            self._disk.close()

    def _has(self, digest: bytes) -> bool:
        return any(tier is not None and digest in tier for tier in (self._memory, self._disk))


def offload_for(config: EngineConfig, prepared: Prepared, pool: BlockPool) -> Offload | None:
    """The configured tiers; None without any. A folder that cannot be used is logged, and the worker serves without it."""
    if not config.offloads:
        return None
    copier = BlockCopier(prepared.cache)
    memory = disk = None
    if config.kv_offload_memory_bytes:
        memory = MemoryTier(config.kv_offload_memory_bytes, copier.block_bytes, copier.device)
    if config.kv_offload_disk_bytes:
        root = Path(config.kv_offload_dir)
        try:
            if not config.kv_offload_dir:
                raise FileNotFoundError("kv_offload_dir is empty")
            prepare_folder(root)
            identity = identity_of(config, prepared, root)
            disk = DiskTier(BlockFolder(root, identity, config.kv_offload_disk_bytes, copier.block_bytes))
        except OSError as error:
            logger.error("no KV blocks are kept on disk: %s", error)
    return None if memory is None and disk is None else Offload(pool, copier, memory, disk)
