"""The addresses that a server listens on, as Twisted endpoints."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from twisted.internet import defer, endpoints
from twisted.internet.interfaces import IStreamServerEndpoint
from twisted.protocols.tls import TLSMemoryBIOFactory
from zope.interface import implementer

if TYPE_CHECKING:
    from socket import socket as Socket

    from inference.server.rotation import ServerTls

BACKLOG = 4096
"""The accept backlog; the kernel may allow less. A client whose SYN is dropped retries after 1 s, then 3 s."""


@implementer(IStreamServerEndpoint)
class _SharedEndpoint:
    """Listens on a socket that other processes may share."""

    def __init__(self, reactor: Any, listening: Socket, tls: ServerTls | None) -> None:
        self._reactor, self._socket, self._tls = reactor, listening, tls

    def listen(self, factory: Any) -> defer.Deferred[Any]:
        """Accept connections from the socket."""
        if self._tls is not None:
            factory = TLSMemoryBIOFactory(self._tls, False, factory)
        return defer.execute(self._reactor.adoptStreamPort, self._socket.fileno(), self._socket.family, factory)


@dataclass(frozen=True, slots=True)
class Listener:
    """An address and its TLS settings; replaces Daphne's endpoint description string."""

    host: str
    port: int
    tls: ServerTls | None = None
    socket: Socket | None = None
    """A socket that listens on the address already."""

    def endpoint(self, reactor: Any) -> Any:
        """The Twisted endpoint to listen on."""
        if self.socket is not None:
            return _SharedEndpoint(reactor, self.socket, self.tls)
        if self.tls is not None:
            return endpoints.SSL4ServerEndpoint(reactor, self.port, self.tls, BACKLOG, self.host)
        kind = endpoints.TCP6ServerEndpoint if ":" in self.host else endpoints.TCP4ServerEndpoint
        return kind(reactor, self.port, BACKLOG, self.host)
