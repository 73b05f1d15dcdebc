"""The connection between a leased worker and its launcher: status lines one way, renewals of the lease the other.

A launcher holds a worker in one of two ways. As its parent it has the worker's pipes: EOF on stdin means that the launcher
has ended, and the worker exits at once. A worker with a lease (`lease_s` > 0) outlives its launcher: a launcher connects to its
address's control channel (`engine.address`) and sends a `Renew` line at least every `lease_s` seconds, and another launcher may
take the worker over, from another host too. Each launcher names its epoch; a worker ignores a lower epoch than the highest that it
has seen. Without a renewal for `lease_s` seconds the worker exits. This module imports no torch: a worker can be taken over while
it loads.
"""

from __future__ import annotations

import logging
import os
import selectors
import signal
import threading
import time
from contextlib import suppress
from enum import IntEnum
from typing import TYPE_CHECKING

import msgspec

from engine.address import Channel
from engine.messages import MALFORMED

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable

    from engine.address import Endpoint

logger = logging.getLogger(__name__)

MAX_LINE_BYTES = 4096
CHECK_EVERY_S = 0.5
LAUNCHER_SILENT_S = 10.0
"""A launcher on another host that has sent nothing for this time has vanished: the leader renews four times a second. It may
connect again.
"""


class Wanted(IntEnum):
    """What a launcher wants of a worker; each follows the one before it. A worker never goes back."""

    RUN = 0
    DRAIN = 1
    """As a first SIGTERM does."""
    HAND_OVER = 2
    """As a second SIGTERM does."""
    END = 3
    """At once, as SIGKILL does."""


class Renew(msgspec.Struct, frozen=True):
    """A launcher's line: it holds the worker on, in its epoch. A launcher that cannot send the worker signals says with every
    line what it wants, so that nothing depends on one line's arrival.
    """

    epoch: int
    wanted: Wanted = Wanted.RUN


class _Launcher:
    """One connected launcher: its unfinished line, what it has not taken yet, and when it was heard last."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self.received = b""
        self.unsent = b""
        self.heard = time.monotonic()

    def report(self, line: bytes) -> None:
        """Send a status line; one that does not read misses it. Raises OSError if the connection has ended."""
        with suppress(BlockingIOError):
            if self.unsent:
                self.unsent = self.unsent[self.connection.send(self.unsent) :]
            if not self.unsent:
                self.unsent = line
                self.unsent = line[self.connection.send(line) :]


class Control:
    """The worker's end of a leased connection, served by a thread of its own."""

    def __init__(self, endpoint: Endpoint, lease_s: float, on_expiry: Callable[[], None]) -> None:
        """Listen at the worker's address. `on_expiry` runs once, in the control thread. Raises OSError."""
        self._endpoint, self._lease_s, self._on_expiry = endpoint, lease_s, on_expiry
        self._epoch = 0
        self._told = Wanted.RUN
        self._renewed = time.monotonic()
        self._state = b""
        """The last line that changed the state, for launchers that connect later."""
        self._lock = threading.Lock()
        self._launchers: list[_Launcher] = []
        self._listener = endpoint.listen(Channel.CONTROL)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._run, name="control", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def report(self, line: bytes, changes_state: bool) -> None:
        """Send a status line to the connected launchers; a launcher that does not read misses it."""
        with self._lock:
            if changes_state:
                self._state = line
            for launcher in self._launchers:
                with suppress(OSError):
                    launcher.report(line)

    def close(self) -> None:
        """Take no more launchers; the connected ones see EOF when the process ends."""
        self._endpoint.release(Channel.CONTROL)

    def _run(self) -> None:
        while time.monotonic() - self._renewed < self._lease_s:
            for key, _ in self._selector.select(CHECK_EVERY_S):
                if key.data is None:
                    self._accept()
                else:
                    self._receive(key.data)
            if self._endpoint.remote:
                self._drop_vanished()
        logger.error("the lease has expired: no launcher has renewed it for %s s", self._lease_s)
        self._on_expiry()

    def _accept(self) -> None:
        try:
            connection, _ = self._listener.accept()
        except OSError:
            return
        connection.setblocking(False)
        launcher = _Launcher(connection)
        self._selector.register(connection, selectors.EVENT_READ, launcher)
        with self._lock:
            self._launchers.append(launcher)
            with suppress(OSError):
                launcher.report(self._state)

    def _receive(self, launcher: _Launcher) -> None:
        try:
            with self._lock:  # a TLS connection is used by one thread at a time
                data = launcher.connection.recv(MAX_LINE_BYTES)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        launcher.heard = time.monotonic()
        *lines, launcher.received = (launcher.received + data).split(b"\n")
        try:
            for line in lines:
                self._obey(msgspec.json.decode(line, type=Renew))
        except MALFORMED as error:
            logger.warning("launcher dropped: %s", error)
            data = b""
        if not data or len(launcher.received) > MAX_LINE_BYTES:
            self._drop(launcher)

    def _obey(self, message: Renew) -> None:
        if message.epoch >= self._epoch:  # else a launcher that has been replaced and does not know it yet
            self._epoch, self._renewed = message.epoch, time.monotonic()
            # A hand-over is asked for again with each line: signals that arrive together are one.
            if message.wanted > self._told or message.wanted is Wanted.HAND_OVER:
                self._go_on(message.wanted)

    def _go_on(self, wanted: Wanted) -> None:
        """Go one step on towards what is wanted; the launcher's next line asks for the step after it."""
        end = wanted is Wanted.END
        self._told = wanted if end else min(wanted, Wanted(self._told + 1))
        os.kill(os.getpid(), signal.SIGKILL if end else signal.SIGTERM)

    def _drop_vanished(self) -> None:
        now = time.monotonic()
        for launcher in [each for each in self._launchers if now - each.heard > LAUNCHER_SILENT_S]:
            logger.warning("launcher dropped: it has been silent for %s s", LAUNCHER_SILENT_S)
            self._drop(launcher)

    def _drop(self, launcher: _Launcher) -> None:
        self._selector.unregister(launcher.connection)
        with self._lock:
            self._launchers.remove(launcher)
        launcher.connection.close()
