"""The listening end of a worker's TCP address: a thread accepts connections and finishes their handshakes.

Only who has shown a certificate of the cluster's authority reaches the worker's loop, which waits for nobody. A connection says
by ALPN what it is for, so that one port is enough. The door reads no message.
"""

from __future__ import annotations

import logging
import os
import selectors
import socket
import ssl
import threading
import time
from collections import deque
from contextlib import suppress
from typing import Any

from engine.network.credentials import Credentials, ServerContext
from engine.network.stream import SecureSocket

logger = logging.getLogger(__name__)

BACKLOG = 128
MAX_HANDSHAKES = 64
"""Connections whose handshake is not finished; a further one takes the place of the oldest. A handshake takes milliseconds, so those
that only hold a place lose it before one that goes on.
"""
MAX_WAITING = 64
"""Connections that the worker's loop has not taken yet, which a long step may delay; further ones are closed."""
HANDSHAKE_S = 5.0
"""Two round trips and two signatures take milliseconds; a client gives up after this time as well."""
CHECK_EVERY_S = 0.5
COMPLAIN_EVERY_S = 1.0
"""Refused connections are logged at most so often: strangers must not fill the log."""


class DoorListener:
    """The finished connections for one purpose; to a selector and to `accept` it is a listening socket."""

    def __init__(self) -> None:
        self._ready: deque[SecureSocket] = deque()
        self._reader, self._writer = os.pipe()
        os.set_blocking(self._writer, False)

    def fileno(self) -> int:
        """Readable while a connection is ready."""
        return self._reader

    def accept(self) -> tuple[SecureSocket, Any]:
        """The next connection, and its peer's address; call it when `fileno` is readable."""
        os.read(self._reader, 1)
        stream = self._ready.popleft()
        return stream, None

    def offer(self, stream: SecureSocket) -> bool:
        """Hand over a connection; False if too many wait. Called by the door's thread."""
        if len(self._ready) >= MAX_WAITING:
            return False
        self._ready.append(stream)
        os.write(self._writer, b"x")
        return True

    def close(self) -> None:
        """Close what nobody has taken."""
        while self._ready:
            self._ready.pop().close()
        os.close(self._reader)
        os.close(self._writer)


class Door:
    """Listens on a TCP port, for several purposes."""

    remote = True

    def __init__(self, host: str, port: int, credentials: Credentials, purposes: list[str]) -> None:
        """Binds the port. Raises CredentialsError or OSError."""
        self._context = ServerContext(credentials, purposes)
        family, _, _, _, place = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        self._listener = socket.create_server(place[:2], family=family, backlog=BACKLOG)
        self._listener.setblocking(False)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._deadlines: dict[SecureSocket, float] = {}
        """Of the handshakes that go on."""
        self._listeners: dict[str, DoorListener] = {}
        self._complained = 0.0
        self._lock = threading.Lock()
        """Guards the listeners and `_closed`."""
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="door", daemon=True)
        self._thread.start()

    def listen(self, purpose: str) -> DoorListener:
        """The connections that are for this purpose, from now on; others are closed."""
        listener = DoorListener()
        with self._lock:
            self._listeners[purpose] = listener
        return listener

    def release(self, purpose: str) -> None:
        """Take no more connections for this purpose; the port is closed with the last one."""
        with self._lock:
            self._listeners.pop(purpose, None)
            self._closed = not self._listeners
        if self._closed:
            self._thread.join()

    def _run(self) -> None:
        while not self._closed:
            try:
                self._attend()
            except Exception:  # an outer boundary: without this thread nobody else is let in
                logger.exception("a connection could not be taken")
                time.sleep(CHECK_EVERY_S)
        for stream in list(self._deadlines):
            self._forget(stream).close()
        self._listener.close()
        self._selector.close()

    def _attend(self) -> None:
        """Do what is due, or wait for it for a short time."""
        now = time.monotonic()
        for stream in [stream for stream, deadline in self._deadlines.items() if now > deadline]:
            self._refuse(stream, "the handshake takes too long")
        for key, _ in self._selector.select(CHECK_EVERY_S):
            if key.data is None:
                self._accept()
            elif key.data in self._deadlines:  # it may have lost its place to one that came at the same time
                self._go_on(key.data)

    def _accept(self) -> None:
        try:
            connection, _ = self._listener.accept()
        except OSError:
            time.sleep(CHECK_EVERY_S)  # no descriptor is left, or it has gone again
            return
        if len(self._deadlines) >= MAX_HANDSHAKES:
            self._refuse(next(iter(self._deadlines)), "too many handshakes at once")
        with connection:  # once it is wrapped, it has no descriptor to close
            try:
                connection.setblocking(False)
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                context = self._context.current()
                stream = context.wrap_socket(connection, server_side=True, do_handshake_on_connect=False)
            except OSError as error:  # it has gone again
                return self._complain(type(error).__name__)
        assert isinstance(stream, SecureSocket)
        self._deadlines[stream] = time.monotonic() + HANDSHAKE_S
        self._selector.register(stream, selectors.EVENT_READ, stream)

    def _go_on(self, stream: SecureSocket) -> None:
        try:
            stream.do_handshake()
        except (ssl.SSLWantReadError, ssl.SSLWantWriteError):  # a handshake fits into the socket's buffer
            return
        except OSError as error:
            return self._refuse(stream, reason_of(error))
        self._forget(stream)
        with self._lock:
            listener = self._listeners.get(stream.selected_alpn_protocol() or "")
            taken = listener is not None and listener.offer(stream)
        if not taken:
            stream.close()

    def _refuse(self, stream: SecureSocket, reason: str) -> None:
        with suppress(OSError):
            self._complain(f"{stream.getpeername()[0]}: {reason}")
        self._forget(stream).close()

    def _forget(self, stream: SecureSocket) -> SecureSocket:
        del self._deadlines[stream]
        self._selector.unregister(stream)
        return stream

    def _complain(self, reason: str) -> None:
        if time.monotonic() - self._complained >= COMPLAIN_EVERY_S:
            self._complained = time.monotonic()
            logger.warning("connection refused: %s", reason)


def reason_of(error: Exception) -> str:
    """Why a connection failed, in words for a person."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"certificate: {error.verify_message}"
    if isinstance(error, ssl.SSLError) and error.reason:
        return f"TLS: {error.reason.lower().replace('_', ' ')}"
    return type(error).__name__
