"""What the tiers of the KV offload hold and have done, as workers report it. Imports no torch."""

from __future__ import annotations

import msgspec


class TierStats(msgspec.Struct, array_like=True, gc=False):
    """A tier of the KV offload: the bytes that it holds, and the blocks that came back, were stored, and were removed for others
    since the worker's start. What several workers share, each reports.
    """

    bytes: int = 0
    hits: int = 0
    stored: int = 0
    evictions: int = 0


class OffloadStats(msgspec.Struct, array_like=True, gc=False):
    """The tiers that the worker has, and what went wrong with the disk: blocks that were damaged, blocks that were dropped because
    it was too slow or failed, and its failures. `late`: requests that were computed instead of waiting longer.
    """

    memory: TierStats | None = None
    disk: TierStats | None = None
    damaged: int = 0
    dropped: int = 0
    failures: int = 0
    late: int = 0
