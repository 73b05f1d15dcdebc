"""The connection between a leased worker and its launcher: status lines one way, renewals of the lease the other.

A launcher holds a worker in one of two ways. As its parent it has the worker's pipes: EOF on stdin means that the launcher
has ended, and the worker exits at once. A worker with a lease (`lease_s` > 0) outlives its launcher: it listens on a Unix
socket, a launcher connects and sends a `Renew` line at least every `lease_s` seconds, and another launcher may take the
worker over. Each launcher names its epoch; a worker ignores a lower epoch than the highest that it has seen. Without
a renewal for `lease_s` seconds the worker exits. This module imports no torch: a worker can be taken over while it loads.
"""

from __future__ import annotations

import logging
import os
import selectors
import socket
import threading
import time
from contextlib import suppress
from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from collections.abc import Callable

logger = logging.getLogger(__name__)

MAX_LINE_BYTES = 4096
CHECK_EVERY_S = 0.5
CONTROL_SUFFIX = ".control"


def control_path(address: str) -> str:
    """The path of the control socket of the worker that listens on this Unix address."""
    return address.removeprefix("unix:") + CONTROL_SUFFIX


class Renew(msgspec.Struct, frozen=True):
    """A launcher's line: it holds the worker on, in its epoch."""

    epoch: int


class _Launcher:
    """One connected launcher and its unfinished line."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self.received = b""


class Control:
    """The worker's end of a leased connection, served by a thread of its own."""

    def __init__(self, path: str, lease_s: float, on_expiry: Callable[[], None]) -> None:
        """Listen on the Unix socket `path`. `on_expiry` runs once, in the control thread."""
        self._path, self._lease_s, self._on_expiry = path, lease_s, on_expiry
        self._epoch = 0
        self._renewed = time.monotonic()
        self._state = b""
        """The last line that changed the state, for launchers that connect later."""
        self._lock = threading.Lock()
        self._launchers: list[_Launcher] = []
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(path)
        os.chmod(path, 0o600)
        self._listener.listen(8)
        self._listener.setblocking(False)
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
                    launcher.connection.send(line)

    def close(self) -> None:
        """Remove the socket; launchers see EOF when the process ends."""
        with suppress(OSError):
            os.unlink(self._path)

    def _run(self) -> None:
        while time.monotonic() - self._renewed < self._lease_s:
            for key, _ in self._selector.select(CHECK_EVERY_S):
                if key.data is None:
                    self._accept()
                else:
                    self._receive(key.data)
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
                connection.send(self._state)

    def _receive(self, launcher: _Launcher) -> None:
        try:
            data = launcher.connection.recv(MAX_LINE_BYTES)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        *lines, launcher.received = (launcher.received + data).split(b"\n")
        try:
            for line in lines:
                self._obey(msgspec.json.decode(line, type=Renew))
        except msgspec.MsgspecError as error:
            logger.warning("launcher dropped: %s", error)
            data = b""
        if not data or len(launcher.received) > MAX_LINE_BYTES:
            self._drop(launcher)

    def _obey(self, message: Renew) -> None:
        if message.epoch >= self._epoch:  # else a launcher that has been replaced and does not know it yet
            self._epoch, self._renewed = message.epoch, time.monotonic()

    def _drop(self, launcher: _Launcher) -> None:
        self._selector.unregister(launcher.connection)
        with self._lock:
            self._launchers.remove(launcher)
        launcher.connection.close()
