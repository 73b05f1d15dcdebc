"""The results of a decode instance on their way to the coordinator: one stream for all requests, with one reader.

A message is `reqId:<id>`, NUL, `<keyword>:<payload>`, NUL, and a chunk of its own. Whoever has a message waits while too many
bytes are unread, also while nobody reads. It knows no request and no engine.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from enum import StrEnum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable

NUL = b"\0"
MAX_UNREAD_BYTES = 8 << 20
SILENCE_S, CHECK_EVERY_S = 5.0, 1.0
HEARTBEAT = b"ka:heartbeat\0"
CLOSE = b"reqId:0xffffffffffffffff\0close:new connection is to established, close the old one.\0"
"""In the vendor's words."""


class Keyword(StrEnum):
    """What a message is."""

    DATA = "data"
    LAST = "lastData"
    ERROR = "error"
    RETRY = "retry"


def message(request_id: str, keyword: Keyword, payload: bytes) -> bytes:
    """The bytes of one message."""
    return b"reqId:%b\0%b:%b\0" % (request_id.encode(), keyword.value.encode(), payload)


class Results:
    """The messages that nobody has read yet, in their order, and the one reader."""

    def __init__(self, max_unread_bytes: int = MAX_UNREAD_BYTES, silence_s: float = SILENCE_S) -> None:
        """`silence_s`: a heartbeat is sent after as many seconds without a message."""
        self._max_unread_bytes, self._silence_s = max_unread_bytes, silence_s
        self._check_every_s = min(CHECK_EVERY_S, silence_s)
        self._unread: deque[bytes] = deque()
        self._bytes = 0
        self._reader: object | None = None
        self._changed = asyncio.Event()

    @property
    def unread_bytes(self) -> int:
        """The bytes of messages that wait."""
        return self._bytes

    @property
    def connected(self) -> bool:
        """Whether somebody reads."""
        return self._reader is not None

    async def send(self, request_id: str, keyword: Keyword, payload: bytes) -> None:
        """Add a message; waits while too much is unread."""
        size = len(payload)
        while self._unread and self._bytes + size > self._max_unread_bytes:
            await self._change()
        self.add(request_id, keyword, payload)

    def add(self, request_id: str, keyword: Keyword, payload: bytes) -> None:
        """Add a message at once: the only one of a request that has failed."""
        made = message(request_id, keyword, payload)
        self._unread.append(made)
        self._bytes += len(made)
        self._wake()

    async def read(self, ended: Callable[[], bool]) -> AsyncGenerator[bytes, None]:
        """The messages, and heartbeats in their absence, until another reader comes, or until `ended` says that no more will
        come. A message that was given out is not given out again. The first piece is empty: it sends the response's head.
        """
        reader = self._reader = object()
        self._wake()
        last = time.monotonic()
        try:
            yield b""
            while self._reader is reader:
                if self._unread:
                    made = self._unread.popleft()
                    self._bytes -= len(made)
                    self._wake()
                    yield made
                    last = time.monotonic()
                elif ended():
                    return
                elif time.monotonic() - last > self._silence_s:
                    yield HEARTBEAT
                    last = time.monotonic()
                else:
                    await self._change(self._check_every_s)
            yield CLOSE
        finally:
            if self._reader is reader:
                self._reader = None

    async def _change(self, timeout_s: float | None = None) -> None:
        """Wait until something has changed."""
        changed = self._changed
        try:
            async with asyncio.timeout(timeout_s):
                await changed.wait()
        except TimeoutError:
            return

    def _wake(self) -> None:
        """Let everybody who waits look again."""
        self._changed.set()
        self._changed = asyncio.Event()
