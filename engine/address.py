"""The address of a worker, as text: "unix:/path". The worker and its clients get the same address. Imports no torch.

A further transport is a class with the three methods of UnixAddress and an entry in `SCHEMES`; no other file depends on
the kind of transport.
"""

from __future__ import annotations

import asyncio
import os
import socket
from contextlib import suppress
from dataclasses import dataclass

BACKLOG = 128


class AddressError(ValueError):
    """The text is not a valid worker address; the message says why."""


@dataclass(frozen=True, slots=True)
class UnixAddress:
    """A Unix stream socket on this host. Linux takes paths of at most 107 bytes."""

    path: str

    def listen(self) -> socket.socket:
        """A non-blocking listening socket that only this user can connect to; raises OSError."""
        self.release()
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        listener.bind(self.path)
        os.chmod(self.path, 0o600)
        listener.listen(BACKLOG)
        listener.setblocking(False)
        return listener

    async def connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """Connect to the worker; returns the streams from and to it. Raises OSError."""
        return await asyncio.open_unix_connection(self.path)

    def release(self) -> None:
        """Remove the socket file."""
        with suppress(FileNotFoundError):
            os.unlink(self.path)


SCHEMES = {"unix": UnixAddress}


def parse(address: str) -> UnixAddress:
    """The transport of an address; raises AddressError for a malformed address or an unknown scheme."""
    scheme, colon, rest = address.partition(":")
    if not colon or not rest:
        raise AddressError(f"{address!r} is no address: scheme:place is expected, such as unix:/run/worker.sock")
    if scheme not in SCHEMES:
        raise AddressError(f"workers cannot be reached by {scheme!r}; known: {', '.join(SCHEMES)}")
    return SCHEMES[scheme](rest)
