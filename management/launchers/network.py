"""Where the workers of this host listen, and by which certificate this process is known to those of other hosts."""

from __future__ import annotations

import random
import socket
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec

from engine.address import TcpAddress

if TYPE_CHECKING:
    from engine.config import EngineConfig
    from engine.network.credentials import Credentials

TRIES = 64


@dataclass(frozen=True, slots=True)
class Network:
    """The default is Unix sockets, and no connections to other hosts."""

    host: str = ""
    """The name or IP address by which other hosts reach this one; empty: workers listen on Unix sockets."""
    ports: range = range(0)
    credentials: Credentials | None = None
    """Always set with a host."""
    nixl_devices: str = ""

    def address(self) -> str | None:
        """An address for a new worker, on a port that is free at the moment; None: on a Unix socket. A worker whose port is taken
        in the meantime ends, and the next one gets another. Raises OSError if no free port is found.
        """
        if not self.host:
            return None
        family, _, _, _, place = socket.getaddrinfo(self.host, None, type=socket.SOCK_STREAM)[0]
        chance = random.SystemRandom()
        for _ in range(TRIES):
            port = chance.choice(self.ports)
            with suppress(OSError), socket.create_server((str(place[0]), port), family=family):
                return str(TcpAddress(self.host, port))
        raise OSError(
            f"no free port for a worker: of {TRIES} between {self.ports[0]} and {self.ports[-1]} none could be bound"
        )

    def completed(self, config: EngineConfig) -> EngineConfig:
        """The worker's configuration with this host's certificate and devices, if it listens on a port."""
        if not self.host:
            return config
        return msgspec.structs.replace(config, tls=self.credentials, nixl_devices=self.nixl_devices)


THIS_HOST = Network()
