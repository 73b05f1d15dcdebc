"""A control connection to a worker on another host, held by a thread of its own; the launcher never waits for the network.

Lines go both ways (`engine.process.control`). A connection that is lost is made again. What the lines mean is not known here.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections import deque
from contextlib import suppress
from functools import cache
from typing import TYPE_CHECKING

from engine.address import Channel, cause_of

if TYPE_CHECKING:
    from concurrent.futures import Future

    from engine.address import Address
    from engine.network.credentials import Credentials

logger = logging.getLogger(__name__)

CONNECT_S = 2.0
"""Hosts of one cluster are milliseconds apart. A reconciler that takes workers over waits for each that is away."""
SILENT_S = 10.0
"""A worker reports every second; after this time without a line its connection is made again."""
RETRY_S = 0.25
MAX_LINES = 1024
"""Lines that wait to be read; the oldest are lost."""


_starting = threading.Lock()


def _loop() -> asyncio.AbstractEventLoop:
    """The event loop of all links of this process."""
    with _starting:
        return _started_loop()


@cache
def _started_loop() -> asyncio.AbstractEventLoop:
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name="links", daemon=True).start()
    return loop


class Link:
    """Connects to the control channel of one worker, and again, until it is closed."""

    def __init__(self, address: Address, credentials: Credentials | None) -> None:
        self._address, self._credentials = address, credentials
        self._lines: deque[bytes] = deque(maxlen=MAX_LINES)
        self._first = threading.Event()
        """Set when the first attempt to connect has ended."""
        self._writer: asyncio.StreamWriter | None = None
        self._complained = False
        self.connected = False
        self.refused = False
        """Whether nobody listens at the worker's port any more."""
        self._task: Future[None] = asyncio.run_coroutine_threadsafe(self._run(), _loop())

    def wait(self) -> bool:
        """Wait for the first attempt to connect, CONNECT_S at most; returns whether it succeeded."""
        self._first.wait(CONNECT_S)
        return self.connected

    def lines(self) -> list[bytes]:
        """The lines since the last call."""
        found = []
        while self._lines:
            found.append(self._lines.popleft())
        return found

    def send(self, line: bytes) -> None:
        """Send a line if there is a connection."""
        _loop().call_soon_threadsafe(self._write, line)

    def close(self) -> None:
        """Send what was given before, and disconnect."""
        _loop().call_soon_threadsafe(self._task.cancel)

    def _write(self, line: bytes) -> None:
        # A peer that reads nothing gets nothing: its lines must not pile up here.
        if self._writer is not None and not self._writer.transport.get_write_buffer_size():
            self._writer.write(line)

    async def _run(self) -> None:
        while True:
            try:
                async with asyncio.timeout(CONNECT_S):
                    reader, writer = await self._address.connect(Channel.CONTROL, self._credentials)
            except (OSError, ValueError) as error:  # also of certificates
                self.refused = isinstance(error, ConnectionRefusedError)
                if not self._complained and not self.refused:  # a worker that starts does not listen yet
                    self._complained = True
                    logger.warning("no connection to the worker at %s: %s", self._address, cause_of(error))
            else:
                await self._hold(reader, writer)
            self._first.set()
            await asyncio.sleep(RETRY_S)

    async def _hold(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Read lines until the connection ends."""
        self._writer, self.connected, self.refused, self._complained = writer, True, False, False
        self._first.set()
        try:
            while True:
                async with asyncio.timeout(SILENT_S):
                    line = await reader.readline()
                if not line:
                    return
                self._lines.append(line)
        except (OSError, ValueError):  # lost, silent, or a line without end
            pass
        finally:
            self._writer, self.connected = None, False
            writer.close()
            with suppress(OSError):
                await writer.wait_closed()
