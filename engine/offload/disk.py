"""The disk tier: two threads between the engine's step and a folder of block files, so that no step waits for a disk.

A block that cannot be written is lost to the tier and to nothing else. After a failure the tier writes nothing for a while; what
it has is still read.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
import weakref
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from engine.offload.blocks import HostRows
    from engine.offload.folder import BlockFolder

logger = logging.getLogger(__name__)

QUEUE_BYTES = 256 << 20
"""Bytes that may wait for the disk; what comes beyond them is not kept."""
RESCAN_S = 5.0
"""Seconds between two looks at what other workers have done in the folder."""
RETRY_S = 30.0
"""Seconds without writing after a failure."""
FIRST_SCAN_S = 2.0
"""The most seconds that a worker's start waits for the list of files; a longer list is read while it serves."""
FLUSH_S = 2.0
"""The most seconds for what is unwritten when the worker ends."""


class Staged:
    """A block that is being read. `content` stays None if it cannot be; nobody reads it once nobody holds this object."""

    __slots__ = ("__weakref__", "content", "digest", "done")

    def __init__(self, digest: bytes) -> None:
        self.digest = digest
        self.content: memoryview | None = None
        self.done = False


class DiskTier:
    """Blocks in a folder. All methods but `close` return at once."""

    def __init__(self, folder: BlockFolder) -> None:
        """Start the threads, and wait a little for the list of files."""
        self.folder = folder
        self.hits = self.stored = self.dropped = self.failures = 0
        self._to_write: queue.Queue[tuple[bytes, HostRows, int] | None] = queue.Queue()
        self._to_read: queue.SimpleQueue[weakref.ref[Staged] | None] = queue.SimpleQueue()
        self._queued: set[bytes] = set()
        self._closing = False
        self._retry_at = 0.0
        self._scanned = threading.Event()
        self._threads = [
            threading.Thread(target=run, name=f"offload-{name}", daemon=True)
            for name, run in (("write", self._write_all), ("read", self._read_all))
        ]
        for thread in self._threads:
            thread.start()
        self._scanned.wait(FIRST_SCAN_S)

    def __contains__(self, digest: bytes) -> bool:
        return digest in self.folder

    def wants(self, digest: bytes) -> bool:
        """Whether the block is neither here nor on its way."""
        return digest not in self.folder and digest not in self._queued

    def room(self, count: int) -> int:
        """How many of `count` blocks may be stored now; the others count as dropped."""
        most = QUEUE_BYTES // self.folder.block_bytes - self._to_write.qsize()
        count_now = 0 if time.monotonic() < self._retry_at else max(0, min(count, most))
        self.dropped += count - count_now
        return count_now

    def store(self, digest: bytes, rows: HostRows, row: int) -> None:
        """Write a block soon: row `row` of `rows`."""
        self._queued.add(digest)
        self._to_write.put((digest, rows, row))

    def fetch(self, staged: Staged) -> None:
        """Read a block soon."""
        self._to_read.put(weakref.ref(staged))

    def touch(self, digests: Iterable[bytes]) -> None:
        """Note that these blocks were used."""
        self.folder.touch(digests)

    def flush(self) -> None:
        """Wait until all that was stored has been written or given up."""
        self._to_write.join()

    def close(self) -> None:
        """Write what is waiting, for a few seconds at most, and stop the threads."""
        self._to_write.put(None)
        self._to_read.put(None)
        deadline = time.monotonic() + FLUSH_S
        self._threads[0].join(FLUSH_S)
        self._closing = True
        for thread in self._threads:
            thread.join(max(0.1, deadline - time.monotonic()))

    def _write_all(self) -> None:
        self._attempt(self._look)
        self._scanned.set()
        next_look = time.monotonic() + RESCAN_S
        while not self._closing:
            now = time.monotonic()
            if now >= next_look:
                self._attempt(self._look)
                next_look = now + RESCAN_S
            try:
                entry = self._to_write.get(timeout=RESCAN_S)
            except queue.Empty:
                continue
            if entry is None:
                self._attempt(self.folder.record_uses)
                return
            self._write(*entry)
            self._to_write.task_done()

    def _look(self) -> None:
        self.folder.record_uses()
        self.folder.scan()

    def _write(self, digest: bytes, rows: HostRows, row: int) -> None:
        if time.monotonic() < self._retry_at:
            self.dropped += 1
        elif self._attempt(lambda: self.folder.write(digest, rows.content(row))):
            self.stored += 1
        self._queued.discard(digest)

    def _attempt(self, work: Callable[[], None]) -> bool:
        """Do it; False if it failed, after which nothing is written for a while."""
        try:
            work()
        except Exception as error:  # an outer boundary: the tier is an aid, and its threads must go on
            self.failures += 1
            self._retry_at = time.monotonic() + RETRY_S
            unforeseen = None if isinstance(error, OSError) else error
            logger.warning("no KV blocks are written for %g s: %s", RETRY_S, error, exc_info=unforeseen)
            return False
        return True

    def _read_all(self) -> None:
        while (waiting := self._to_read.get()) is not None:
            staged = waiting()
            if staged is not None:
                try:
                    staged.content = self.folder.read(staged.digest)
                except Exception:  # as above: the prompt is computed instead
                    logger.exception("a block was not read")
                    self.failures += 1
                staged.done = True
