"""The blocks that this worker fetches from others, from the request for them until they are in its own cache.

A thread fetches them into memory of the host, and the engine's loop writes them into the cache when their request starts. Until that the request waits;
if they do not come, it starts without them and computes its prompt. Nothing here decides what a sequence says.
"""

from __future__ import annotations

import logging
import threading
from typing import TYPE_CHECKING

from engine.kv_transfer.handle import TransferCode
from engine.kv_transfer.transport import TransferFailed

if TYPE_CHECKING:
    from collections.abc import Callable

    from engine.block_pool import BlockPool
    from engine.kv_transfer.blocks import Bytes, CacheBlocks
    from engine.kv_transfer.handle import KvSource
    from engine.kv_transfer.transport import Transport, Wanted
    from engine.request import Request

logger = logging.getLogger(__name__)

MAX_FETCHES = 16
"""Transfers that are fetched at a time; further ones wait."""
MAX_EARLY = 16
"""Transfers beside them that are fetched while their prompts are computed, which may take long; further ones begin with their requests."""
MAX_ARRIVALS = 64
MAX_STAGED_BYTES = 512 << 20
"""Bytes that wait for their requests to start, above which no further transfer begins."""


class Arrival:
    """The blocks of one request on their way."""

    def __init__(
        self, wanted: Wanted, blocks: CacheBlocks, pool: BlockPool, note: Callable[[int, TransferCode | None], None]
    ) -> None:
        """`note` is told, when the request starts, how many blocks came, or why they did not."""
        self.wanted, self._blocks, self._pool, self._note = wanted, blocks, pool, note
        self.settled = False
        """Whether the request may start: the blocks are here, or will not come."""
        self.failure: TransferCode | None = None
        self.cancelled = False
        self._pieces: list[tuple[int, int, Bytes]] = []

    @property
    def staged_bytes(self) -> int:
        """Bytes that have arrived and are not in the cache."""
        return sum(len(data) for _, _, data in self._pieces)

    def take(self, first: int, count: int, data: Bytes) -> None:
        """Stage blocks; called by the fetching thread, until it `settle`s."""
        self._pieces.append((first, count, data))

    def settle(self, failure: TransferCode | None) -> None:
        """The last word of the fetching thread."""
        self.failure = failure
        if failure is not None or self.cancelled:  # one piece may have come after it was cancelled
            self._pieces = []
        self.settled = True

    def cancel(self) -> None:
        """The request has left the engine. A piece that comes meanwhile goes when the thread settles."""
        self.cancelled, self._pieces = True, []

    def fill(self, request: Request) -> None:
        """Write the blocks into those of the starting request, which may have found its first ones in the prefix cache, and count
        them as computed. The last token is always computed, for its logits.
        """
        pieces, self._pieces = self._pieces, []
        self._note(sum(count for _, count, _ in pieces), self.failure)
        size = self._pool.block_size
        tokens = min(self.wanted.num_tokens, len(request.token_ids) - 1)
        have = len(request.block_table)
        # What the prefix cache had when the transfer began may have been evicted since.
        if self.failure is not None or have < self.wanted.first_block or tokens <= have * size:
            return
        if not self._pool.allocate(request, tokens):
            return
        for first, count, data in pieces:
            skip, end = max(0, have - first), min(first + count, len(request.block_table))
            if first + skip < end:
                self._blocks.write(request.block_table[first + skip : end], data, skip, count)
        request.num_computed_tokens = request.num_read_tokens = tokens
        self._pool.cache(request, tokens)


class Arrivals:
    """All arrivals of a worker, and the threads that fetch them."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self._arrivals: list[Arrival] = []
        self._slots = threading.BoundedSemaphore(MAX_FETCHES)
        self._early = threading.BoundedSemaphore(MAX_EARLY)

    def begin(self, source: KvSource, arrival: Arrival, early: bool) -> None:
        """Fetch the blocks of an arrival in a thread, unless too many are on their way; `early`: before its request comes."""
        self._arrivals = [other for other in self._arrivals if other.staged_bytes or not other.settled]
        staged = sum(other.staged_bytes for other in self._arrivals)
        if len(self._arrivals) >= MAX_ARRIVALS or staged > MAX_STAGED_BYTES:
            arrival.settle(TransferCode.CROWDED)
            return
        if early and not self._early.acquire(blocking=False):
            arrival.settle(TransferCode.CROWDED)
            return
        self._arrivals.append(arrival)
        threading.Thread(target=self._fetch, args=(source, arrival, early), name="kv-fetch", daemon=True).start()

    def close(self) -> None:
        """Cancel all arrivals."""
        for arrival in self._arrivals:
            arrival.cancel()

    def _fetch(self, source: KvSource, arrival: Arrival, early: bool) -> None:
        failure: TransferCode | None = TransferCode.LOST
        if not early:
            self._slots.acquire()
        try:
            self._transport.fetch(source, arrival.wanted, arrival)
            failure = None
        except TransferFailed as error:
            failure = error.code
        except Exception:  # an outer boundary: a thread of its own, and the request must not wait for ever
            logger.exception("fetching blocks failed")
        finally:
            (self._early if early else self._slots).release()
            arrival.settle(failure)
