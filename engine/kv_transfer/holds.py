"""The blocks that this worker holds for others, from the first that is filled until they are fetched, released or too old.

The engine's loop owns the blocks: it alone opens, keeps and ends a hold. Threads that send read blocks under the hold's lock, so a block
that is given up is never being read.
"""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING

from engine.kv_transfer.handle import KvSource

if TYPE_CHECKING:
    from engine.block_pool import BlockPool
    from engine.kv_transfer.blocks import Bytes, CacheBlocks
    from engine.kv_transfer.handle import Identity
    from engine.request import Request

HOLD_S = 30.0
"""Seconds that blocks are held after their sequence has ended here."""


class HoldEnded(Exception):
    """The blocks are held no more."""


class Hold:
    """The blocks of one sequence, which its request owns while it runs."""

    def __init__(self, source: KvSource, identity: Identity, blocks: CacheBlocks) -> None:
        self.identity = identity
        self.announced = source
        self.kept = False
        """Whether the sequence has ended here and may go on elsewhere; the hold then owns the blocks."""
        self._blocks = blocks
        self._changed = threading.Condition()
        self._filled = 0
        """Blocks that can be read."""
        self._ended = self._fetched = False
        self._expires = 0.0
        self.block_table: list[int] = []

    @property
    def source(self) -> KvSource | None:
        """Where the blocks are, once the sequence has ended here."""
        return self.announced if self.kept else None

    def progress(self, request: Request) -> None:
        """The results of a step have been read: its full blocks can be sent."""
        with self._changed:
            self.block_table = list(request.block_table)
            self._filled = min(request.num_read_tokens, self.announced.num_tokens) // self.announced.block_size
            self._changed.notify_all()

    def suspend(self) -> None:
        """The request is about to lose its blocks, and will compute them again."""
        with self._changed:
            self.block_table, self._filled = [], 0

    def keep(self, request: Request) -> None:
        """The sequence ends here: take over its blocks."""
        with self._changed:
            self.block_table, request.block_table = request.block_table, []
            self.kept, self._filled = True, self.announced.num_blocks
            self._expires = time.monotonic() + HOLD_S
            self._changed.notify_all()

    def leave(self) -> None:
        """The request leaves the engine. If it has not been kept, there is nothing to hold."""
        if not self.kept:
            self.end()

    def over(self, now: float) -> bool:
        """Whether nobody will fetch the blocks any more; `now` in monotonic seconds."""
        return self._ended or (self.kept and (self._fetched or now >= self._expires))

    def end(self) -> None:
        """Let nobody read the blocks from now on."""
        with self._changed:
            self._ended = True
            if not self.kept:
                self.block_table = []
            self._changed.notify_all()

    def fetched(self) -> None:
        """A worker has all blocks, perhaps before the sequence ends here; called by a sending thread."""
        self._fetched = True

    def read(self, first: int, most: int, timeout_s: float, into: Bytes | None = None) -> Bytes | None:
        """A copy of the next blocks from number `first` on, at most `most` of them, in `into` if it is given; None if none is filled
        within `timeout_s`. Called by a sending thread; raises HoldEnded.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._ended or self._filled > first, timeout_s)
            if self._ended:
                raise HoldEnded
            if self._filled <= first:
                return None
            return self._blocks.read(self.block_table[first : min(self._filled, first + most)], into)


class Holds:
    """All holds of a worker, by transfer."""

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool
        self._holds: dict[str, Hold] = {}

    def __contains__(self, transfer_id: str) -> bool:
        return transfer_id in self._holds

    def __bool__(self) -> bool:
        return bool(self._holds)

    def add(self, hold: Hold) -> None:
        """Register a hold; its transfer is new."""
        self._holds[hold.announced.transfer_id] = hold

    @property
    def awaited(self) -> bool:
        """Whether another worker will fetch blocks and continue a request. It then waits for the end of the current step, because the
        engine's loop reads its message between two steps.
        """
        return any(hold.kept for hold in self._holds.values())

    def find(self, transfer_id: str) -> Hold | None:
        """The hold of a transfer; called by sending threads too."""
        return self._holds.get(transfer_id)

    @property
    def num_blocks(self) -> int:
        """Blocks that are held for sequences that have ended here."""
        return len({block for hold in self._holds.values() if hold.kept for block in hold.block_table})

    def release(self, transfer_ids: list[str]) -> None:
        """End these transfers' holds, if their sequences have ended here."""
        for transfer_id in transfer_ids:
            hold = self._holds.get(transfer_id)
            if hold is not None and hold.kept:
                hold.end()

    def close(self) -> None:
        """Let nobody read any block from now on."""
        for hold in self._holds.values():
            hold.end()

    def poll(self) -> None:
        """Give back the blocks of holds that are over."""
        now = time.monotonic()
        for transfer_id, hold in list(self._holds.items()):
            if hold.over(now):
                hold.end()
                self._pool.free(hold)
                del self._holds[transfer_id]
