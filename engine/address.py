"""The address of a worker, as text: "unix:/path" on one host, "tcp://host:port" between hosts. The worker and its clients get the
same address. Imports no torch.

A further transport is a class with the methods of UnixAddress and an entry in `SCHEMES`; no other file depends on the kind of
transport. Over TCP both sides show certificates of the cluster's authority (`engine.network`); without them nothing is said.
"""

from __future__ import annotations

import asyncio
import os
import re
import socket
from contextlib import suppress
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from engine.network.credentials import CredentialsError
from engine.network.door import Door, reason_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from engine.network.credentials import Credentials

BACKLOG = 128
CONTROL_SUFFIX = ".control"
SHUTDOWN_S = 1.0
"""How long a closed TLS connection waits for its peer's word: a peer that has vanished says none."""


class AddressError(ValueError):
    """The text is not a valid worker address, or the address cannot be used without certificates; the message says why."""


class Channel(StrEnum):
    """What a connection to a worker is for; over TCP it is named in the handshake."""

    REQUESTS = "dragoman-requests"
    """Frames of `engine.messages`."""
    CONTROL = "dragoman-control"
    """Lines of `engine.process.control`."""


class Listener(Protocol):
    """What a worker accepts connections from; a listening socket is one."""

    def fileno(self) -> int:
        """For a selector: readable when a connection waits."""

    def accept(self) -> tuple[socket.socket, Any]:
        """The next connection."""

    def close(self) -> None:
        """Take no more connections."""


class Endpoint(Protocol):
    """A worker's end of its address."""

    @property
    def remote(self) -> bool:
        """Whether peers are on other hosts, and may vanish without a word."""

    def listen(self, purpose: Channel) -> Listener:
        """Take connections for this purpose; raises OSError."""

    def release(self, purpose: Channel) -> None:
        """Leave nothing behind of `listen`."""


@dataclass(frozen=True, slots=True)
class UnixAddress:
    """A Unix stream socket on this host, which only this user can connect to. Linux takes paths of at most 107 bytes."""

    path: str
    remote: ClassVar[bool] = False

    def endpoint(self, credentials: Credentials | None) -> Endpoint:
        """The worker's end; it needs no credentials, for the kernel knows who the user is."""
        return self

    def path_of(self, purpose: Channel) -> str:
        """The socket's file."""
        return self.path + (CONTROL_SUFFIX if purpose is Channel.CONTROL else "")

    def listen(self, purpose: Channel) -> socket.socket:
        """A non-blocking listening socket; raises OSError."""
        path = self.path_of(purpose)
        self.release(purpose)
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        listener.bind(path)
        os.chmod(path, 0o600)
        listener.listen(BACKLOG)
        listener.setblocking(False)
        return listener

    def dial(self, timeout_s: float, credentials: Credentials | None) -> socket.socket:
        """A connected socket that blocks, for threads. Raises OSError."""
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            connection.settimeout(timeout_s)
            connection.connect(self.path)
        except OSError:
            connection.close()
            raise
        return connection

    def release(self, purpose: Channel) -> None:
        """Remove the socket's file."""
        with suppress(FileNotFoundError):
            os.unlink(self.path_of(purpose))

    async def connect(
        self, purpose: Channel, credentials: Credentials | None
    ) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """Connect to the worker; returns the streams from and to it. Raises OSError."""
        return await asyncio.open_unix_connection(self.path_of(purpose))


@dataclass(frozen=True, slots=True)
class TcpAddress:
    """A TCP port with mutual TLS. The worker's certificate must name `host`, a host name or an IP address."""

    host: str
    port: int
    remote: ClassVar[bool] = True

    def __str__(self) -> str:
        return f"tcp://{f'[{self.host}]' if ':' in self.host else self.host}:{self.port}"

    def endpoint(self, credentials: Credentials | None) -> Endpoint:
        """Bind the port. Raises OSError, CredentialsError, or AddressError without credentials."""
        return Door(self.host, self.port, self._needed(credentials), list(Channel))

    async def connect(
        self, purpose: Channel, credentials: Credentials | None
    ) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """The same as a Unix address's. Raises OSError, CredentialsError, or AddressError without credentials."""
        # In a thread: files are read, and a password may take long to unlock its key.
        context = await asyncio.to_thread(self._needed(credentials).client_context, purpose)
        return await asyncio.open_connection(
            self.host, self.port, ssl=context, server_hostname=self.host, ssl_shutdown_timeout=SHUTDOWN_S
        )

    def dial(self, timeout_s: float, credentials: Credentials | None) -> socket.socket:
        """The same as a Unix address's. Raises OSError, CredentialsError, or AddressError without credentials."""
        context = self._needed(credentials).client_context(Channel.REQUESTS)
        plain = socket.create_connection((self.host, self.port), timeout_s)
        try:
            return context.wrap_socket(plain, server_hostname=self.host)
        except OSError:
            plain.close()
            raise

    def _needed(self, credentials: Credentials | None) -> Credentials:
        if credentials is None:
            raise AddressError(
                f"{self} is not used in plain text: set CLUSTER_AUTHORITY, CLUSTER_CERTIFICATE and CLUSTER_KEY, which "
                "`cluster-certificates` makes"
            )
        return credentials


def cause_of(error: Exception) -> str:
    """Why a connection to a worker failed, for a person."""
    return str(error) if isinstance(error, AddressError | CredentialsError) else reason_of(error)


Address = UnixAddress | TcpAddress


def _tcp(rest: str) -> TcpAddress:
    matched = re.fullmatch(r"//(?:\[([0-9A-Fa-f:.]+)\]|([A-Za-z0-9._-]+)):([0-9]{1,5})", rest)
    if matched is None or not 1 <= int(matched[3]) <= 65535:
        raise AddressError(f"'tcp:{rest}' is no address: tcp://host:port is expected, with a port from 1 to 65535")
    return TcpAddress(matched[1] or matched[2], int(matched[3]))


SCHEMES: dict[str, Callable[[str], Address]] = {"unix": UnixAddress, "tcp": _tcp}


def parse(address: str) -> Address:
    """The transport of an address; raises AddressError for a malformed address or an unknown scheme."""
    scheme, colon, rest = address.partition(":")
    if not colon or not rest:
        raise AddressError(f"{address!r} is no address: scheme:place is expected, such as unix:/run/worker.sock")
    if scheme not in SCHEMES:
        raise AddressError(f"workers cannot be reached by {scheme!r}; known: {', '.join(SCHEMES)}")
    return SCHEMES[scheme](rest)
