"""The transports by name: the values of the option `kv_transport`. A further one is a class and an entry here."""

from __future__ import annotations

from typing import TYPE_CHECKING

from engine.kv_transfer.sockets import Sockets

if TYPE_CHECKING:
    from collections.abc import Callable

    from engine.config import EngineConfig
    from engine.kv_transfer.transport import Transport


def _sockets(config: EngineConfig) -> Transport:
    return Sockets(config.tls)


def _nixl(config: EngineConfig) -> Transport:
    from engine.kv_transfer.nixl import Nixl  # an optional package

    return Nixl(config)


TRANSPORTS: dict[str, Callable[[EngineConfig], Transport]] = {"sockets": _sockets, "nixl": _nixl}


def transport_for(config: EngineConfig) -> Transport:
    """The configured transport; raises ModelError."""
    return TRANSPORTS[config.kv_transport](config)
