"""The listeners: which planes and gRPC services, of the server and of the dialects, share an address, and their TLS."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from config.asgi import ControlPlane, SharedPort
from inference.http.auth import Authenticator
from inference.http.routing import RouteTable
from inference.planes.front import front_planes
from inference.planes.plane import Plane
from inference.server.grpc import GrpcLimits, GrpcServer
from inference.server.listener import Listener
from inference.server.tls import MutualContextFactory

if TYPE_CHECKING:
    from collections.abc import Iterable

    from config.options import Options
    from inference.planes.declaration import Dialect, GrpcListener, PlaneListener, Setup, Terminate
    from inference.services import Services

Address = tuple[str, int]


@dataclass(slots=True)
class Listeners:
    """Planes by address, TLS and body limit of each address, and gRPC services by address."""

    planes: dict[Address, list[Any]] = field(default_factory=dict)
    tls: dict[Address, MutualContextFactory] = field(default_factory=dict)
    limits: dict[Address, int] = field(default_factory=dict)
    grpc: dict[Address, list[GrpcListener]] = field(default_factory=dict)

    def add(self, address: Address, plane: Any, limit: int, tls: MutualContextFactory | None = None) -> None:
        """Add a plane to an address; the first plane of an address decides about TLS."""
        if address in self.planes and (address in self.tls) != (tls is not None):
            raise ValueError(f"the planes on port {address[1]} must all have TLS, or none")
        self.planes.setdefault(address, []).append(plane)
        self.limits[address] = max(limit, self.limits.get(address, 0))
        if tls is not None:
            self.tls.setdefault(address, tls)

    @property
    def shared(self) -> dict[Address, SharedPort]:
        """The application of each address."""
        return {address: SharedPort(planes) for address, planes in self.planes.items()}

    @property
    def endpoints(self) -> list[Listener]:
        """The addresses that the server binds, with their TLS."""
        return [Listener(host, port, self.tls.get((host, port))) for host, port in self.planes]

    def grpc_servers(self, handshake_timeout_s: float, shared: bool) -> list[GrpcServer]:
        """One server per address; its services share the largest of their limits. `shared`: with other processes."""
        return [
            GrpcServer(
                [service.handler for service in services],
                *address,
                GrpcLimits(
                    max(service.max_message_bytes for service in services),
                    max(service.max_connections for service in services),
                    handshake_timeout_s,
                    shared,
                ),
            )
            for address, services in self.grpc.items()
        ]


def build_listeners(
    options: Options, dialects: Iterable[Dialect], setups: Iterable[Setup], services: Services, terminate: Terminate
) -> Listeners:
    """Build all planes and gRPC services, and start the dialects.

    Raises SetupError, TlsError or ValueError, and binds nothing.
    """
    listeners = Listeners()
    for plane in front_planes(services, dialects):
        listeners.add((options.host, options.front_port), plane, options.max_body_bytes)
    listeners.add((options.host, options.control_port), ControlPlane(), options.max_body_bytes)
    for setup in setups:
        parts = setup.start(services, terminate)
        services.generator.observers += parts.observers
        for declared in parts.planes:
            if declared.port:
                _add_plane(listeners, options, declared, services)
        for service in parts.grpc:
            if service.port:
                listeners.grpc.setdefault((service.host, service.port), []).append(service)
    return listeners


def _add_plane(listeners: Listeners, options: Options, declared: PlaneListener, services: Services) -> None:
    tls = None if declared.tls is None else MutualContextFactory(declared.tls)
    # Client certificates replace API keys; without certificates, keys are required as on every plane.
    authenticator = declared.authenticator or Authenticator(
        tls is None and options.api_key_required_on(declared.host), options.own_keys
    )
    table = RouteTable([declared.routes])
    plane = Plane(declared.name, table, services, authenticator, declared.answer_headers)
    listeners.add((declared.host, declared.port), plane, declared.max_body_bytes, tls)
