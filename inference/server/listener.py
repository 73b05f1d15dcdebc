"""The addresses that a server listens on, as Twisted endpoints, and why one cannot be bound."""

from __future__ import annotations

import socket
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from twisted.internet import defer, endpoints
from twisted.internet.interfaces import IStreamServerEndpoint
from twisted.protocols.tls import TLSMemoryBIOFactory
from zope.interface import implementer

if TYPE_CHECKING:
    from inference.server.rotation import ServerTls

BACKLOG = 4096
"""The accept backlog; the kernel may allow less. A client whose SYN is dropped retries after 1 s, then 3 s."""
HOST_SETTING = "DRAGOMAN_HOST"
"""The one setting that may give an address as a name."""


class CannotBind(OSError):
    """An address that cannot be bound; the text names the setting that gives the address, or its port."""

    def __init__(self, host: str, port: int, setting: str, reason: Exception | None) -> None:
        reason = reason or why_unbound(host, port)
        if isinstance(reason, socket.gaierror):
            setting = HOST_SETTING
        told = "" if reason is None else f": {getattr(reason, 'strerror', None) or reason}"
        super().__init__(f"{setting}: port {port} of {host} cannot be bound{told}")


def why_unbound(host: str, port: int) -> OSError | None:
    """Why an address cannot be bound; None if it can. It is bound and released."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
    except OSError as error:
        return error
    return None


@implementer(IStreamServerEndpoint)
class _SharedEndpoint:
    """Listens on a socket that other processes may share."""

    def __init__(self, reactor: Any, listening: socket.socket, tls: ServerTls | None) -> None:
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
    setting: str = ""
    """What gives the port."""
    socket: socket.socket | None = None
    """A socket that listens on the address already."""

    def endpoint(self, reactor: Any) -> Any:
        """The Twisted endpoint to listen on."""
        if self.socket is not None:
            return _SharedEndpoint(reactor, self.socket, self.tls)
        if self.tls is not None:
            return endpoints.SSL4ServerEndpoint(reactor, self.port, self.tls, BACKLOG, self.host)
        kind = endpoints.TCP6ServerEndpoint if ":" in self.host else endpoints.TCP4ServerEndpoint
        return kind(reactor, self.port, BACKLOG, self.host)
