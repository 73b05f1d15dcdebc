"""What a worker's prefix cache should hold: the block hashes of the prompts that this process sent there."""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence


class PrefixMemory:
    """At most `capacity` block hashes, the least recently sent are forgotten first, and a chain from its end, as in the
    worker's own cache.
    """

    def __init__(self, capacity: int) -> None:
        self._capacity = max(1, capacity)
        self._hashes: OrderedDict[bytes, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._hashes)

    def match(self, hashes: Sequence[bytes]) -> int:
        """The number of blocks in the longest known prefix."""
        known = self._hashes
        for count, digest in enumerate(hashes):
            if digest not in known:
                return count
        return len(hashes)

    def record(self, hashes: Sequence[bytes]) -> None:
        """A prompt with these blocks was sent."""
        for digest in reversed(hashes[: self._capacity]):
            self._hashes[digest] = None
            self._hashes.move_to_end(digest)
        while len(self._hashes) > self._capacity:
            self._hashes.popitem(last=False)
