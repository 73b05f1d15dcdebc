"""The listener of gRPC services, on the loop that the planes run on."""

from __future__ import annotations

from typing import TYPE_CHECKING

import grpc

if TYPE_CHECKING:
    from collections.abc import Iterable

MAX_MESSAGE_BYTES = 64 << 20


class GrpcServer:
    """Serves the handlers of one port until it is stopped."""

    def __init__(self, handlers: Iterable[grpc.GenericRpcHandler], host: str, port: int) -> None:
        self._handlers, self._host, self._port = tuple(handlers), host, port
        self._server: grpc.aio.Server | None = None

    async def start(self) -> None:
        """Bind; raises OSError or RuntimeError when the address is taken."""
        options = [("grpc.max_receive_message_length", MAX_MESSAGE_BYTES), ("grpc.max_send_message_length", -1),
                   ("grpc.so_reuseport", 0)]  # fmt: skip
        self._server = grpc.aio.server(options=options)
        self._server.add_generic_rpc_handlers(self._handlers)
        host = f"[{self._host}]" if ":" in self._host else self._host
        if self._server.add_insecure_port(f"{host}:{self._port}") == 0:
            raise OSError(f"port {self._port} of {self._host} cannot be bound")
        await self._server.start()

    async def stop(self, grace_s: float) -> None:
        """Take no more calls, let those that run end within `grace_s`, and cancel the rest."""
        if self._server is not None:
            await self._server.stop(grace_s)
