"""Where a worker listens, as text: "unix:/path". Torch-free; the worker and its clients are told the same address.

A further transport is a class with the three methods of UnixAddress and a line in `SCHEMES`; nothing outside this file
knows how an address is reached.
"""

from __future__ import annotations

import asyncio
import os
import socket
from contextlib import suppress
from dataclasses import dataclass

BACKLOG = 128


class AddressError(ValueError):
    """The text is no address that a worker can have; it says why."""


@dataclass(frozen=True, slots=True)
class UnixAddress:
    """A Unix stream socket on this host. Linux takes paths of at most 107 bytes."""

    path: str

    def listen(self) -> socket.socket:
        """A listening socket that never blocks and only this user reaches; raises OSError."""
        self.release()
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        listener.bind(self.path)
        os.chmod(self.path, 0o600)
        listener.listen(BACKLOG)
        listener.setblocking(False)
        return listener

    async def connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """The streams to and from whoever listens; raises OSError."""
        return await asyncio.open_unix_connection(self.path)

    def release(self) -> None:
        """Leave nothing behind once nobody listens."""
        with suppress(FileNotFoundError):
            os.unlink(self.path)


SCHEMES = {"unix": UnixAddress}


def parse(address: str) -> UnixAddress:
    """The transport of an address; raises AddressError, which names a scheme that is not known."""
    scheme, colon, rest = address.partition(":")
    if not colon or not rest:
        raise AddressError(f"{address!r} is no address: scheme:place is expected, such as unix:/run/worker.sock")
    if scheme not in SCHEMES:
        raise AddressError(f"workers cannot be reached by {scheme!r}; known: {', '.join(SCHEMES)}")
    return SCHEMES[scheme](rest)
