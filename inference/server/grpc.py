"""The gRPC listener, on the event loop of the planes."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING

import grpc

from inference.server.leaving import ignore_new_connections
from inference.server.listener import CannotBind

if TYPE_CHECKING:
    from collections.abc import Iterable

    from inference.server.rotation import ServerTls

MAX_STREAMS = 128
"""Concurrent calls per connection."""
MAX_METADATA_BYTES = 16 << 10
SETTLE_S = 0.5
"""Seconds in which a connection that was accepted last makes its first call; less than the second after which a client
repeats its SYN."""
IDLE_S, PING_EVERY_S, PING_TIMEOUT_S = 300, 60, 20


@dataclass(frozen=True, slots=True)
class GrpcLimits:
    """Limits of the gRPC port: the longest message, connections, and the seconds until a new connection must speak
    HTTP/2. `shared`: other processes may serve the same port; the kernel distributes connections among them.
    """

    max_message_bytes: int
    max_connections: int
    handshake_timeout_s: float
    shared: bool = False

    @property
    def options(self) -> list[tuple[str, int]]:
        """Channel arguments of gRPC core; all others have their defaults. A message that is too long is refused by its
        length, unread.
        """
        return [
            ("grpc.max_receive_message_length", self.max_message_bytes),
            ("grpc.max_send_message_length", -1),
            ("grpc.max_concurrent_streams", MAX_STREAMS),
            ("grpc.max_allowed_incoming_connections", self.max_connections),
            ("grpc.max_metadata_size", MAX_METADATA_BYTES),
            ("grpc.absolute_max_metadata_size", MAX_METADATA_BYTES),
            ("grpc.server_handshake_timeout_ms", round(self.handshake_timeout_s * 1000)),
            ("grpc.max_connection_idle_ms", IDLE_S * 1000),
            # A stalled client answers no ping; its calls and permits end with its connection.
            ("grpc.keepalive_time_ms", PING_EVERY_S * 1000),
            ("grpc.keepalive_timeout_ms", PING_TIMEOUT_S * 1000),
            # A window that grows with the bandwidth would buffer data that no handler has asked for yet.
            ("grpc.http2.bdp_probe", 0),
            ("grpc.so_reuseport", int(self.shared)),
        ]


class GrpcServer:
    """Serves the handlers of one port until it is stopped."""

    def __init__(
        self,
        handlers: Iterable[grpc.GenericRpcHandler],
        host: str,
        port: int,
        limits: GrpcLimits,
        tls: ServerTls | None = None,
        setting: str = "",
    ) -> None:
        """`setting` gives the port."""
        self._handlers, self._host, self._port, self._limits = tuple(handlers), host, port, limits
        self._tls, self._setting = tls, setting
        self._server: grpc.aio.Server | None = None

    async def start(self) -> None:
        """Bind; raises CannotBind."""
        self._server = grpc.aio.server(options=self._limits.options)
        address = f"[{self._host}]:{self._port}" if ":" in self._host else f"{self._host}:{self._port}"
        handlers = self._handlers if self._tls is None else tuple(map(self._tls.guarded, self._handlers))
        self._server.add_generic_rpc_handlers(handlers)
        try:
            if self._tls is None:
                self._server.add_insecure_port(address)
            else:
                self._server.add_secure_port(address, self._tls.grpc_credentials())
        except RuntimeError as error:  # gRPC does not say why
            raise CannotBind(self._host, self._port, self._setting, None) from error
        await self._server.start()

    async def stop(self, grace_s: float) -> None:
        """Refuse new calls, wait up to `grace_s` for running ones, cancel the rest. Of a port that other processes serve,
        take no new connections first: they get those, and none is reset.
        """
        if self._server is not None:
            if self._limits.shared and ignore_new_connections(self._port):
                await asyncio.sleep(SETTLE_S)
            await self._server.stop(grace_s)
