"""A TLS connection that is used as a socket that does not block. It never waits and starts no handshake."""

from __future__ import annotations

import ssl
from contextlib import suppress
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

RECORD_BYTES = 1 << 14
"""The most plain text of a TLS record."""


class SecureSocket(ssl.SSLSocket):
    """Its `recv` and `send` raise BlockingIOError where a plain socket's would. One thread at a time may use it."""

    def recv(self, buflen: int = 1024, flags: int = 0) -> bytes:
        """About `buflen` bytes, whole records, so that nothing stays behind in this object, of which a selector would not tell."""
        received = bytearray()
        try:
            while len(received) < buflen:
                data = super().recv(RECORD_BYTES, flags)
                if not data:
                    break
                received += data
        except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
            if not received:
                raise BlockingIOError from None
        return bytes(received)

    def send(self, data: ReadableBuffer, flags: int = 0) -> int:
        """Send as much as the connection takes. What was not taken must come first in the next call."""
        view, sent = memoryview(data), 0
        with suppress(ssl.SSLWantReadError, ssl.SSLWantWriteError):
            while sent < len(view):
                sent += super().send(view[sent : sent + RECORD_BYTES], flags)
        if not sent and len(view):
            raise BlockingIOError
        return sent
