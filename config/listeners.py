"""The listeners: which planes and gRPC services, of the server and of the dialects, share an address, and their TLS."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from config.addresses import Address, settings_of_addresses
from config.asgi import ControlPlane, SharedPort
from config.options import is_loopback
from config.tls import tls_files
from inference.http.auth import Authenticator
from inference.http.routing import RouteTable
from inference.planes.front import front_planes
from inference.planes.plane import Plane
from inference.server.grpc import GrpcLimits, GrpcServer
from inference.server.listener import Listener
from inference.server.rotation import ServerTls

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from config.options import Options
    from inference.planes.declaration import Dialect, GrpcListener, PlaneListener, Setup, Terminate
    from inference.server.tls import TlsFiles
    from inference.services import Services

PLAIN_TEXT = (
    "{}:{} can be reached from other machines, which would send keys and prompts in plain text: set "
    "DRAGOMAN_TLS_CERTIFICATE and DRAGOMAN_TLS_KEY; or DRAGOMAN_BEHIND_TLS=true behind a proxy that terminates TLS; or "
    "DRAGOMAN_ALLOW_PLAIN_TEXT=true on a trusted network"
)
"""Why an address is not served."""


@dataclass(slots=True)
class Listeners:
    """Planes by address, TLS and body limit of each address, and gRPC services by address.

    `tls_files` are those of all listeners that have none of their own. `plain_text`: whether listeners beyond loopback need
    none.
    """

    tls_files: TlsFiles | None = None
    plain_text: bool = False
    settings: Mapping[Address, str] = field(default_factory=dict)
    """What gives the port of each address."""
    planes: dict[Address, list[Any]] = field(default_factory=dict)
    tls: dict[Address, ServerTls] = field(default_factory=dict)
    limits: dict[Address, int] = field(default_factory=dict)
    grpc: dict[Address, list[GrpcListener]] = field(default_factory=dict)
    grpc_tls: dict[Address, ServerTls | None] = field(default_factory=dict)
    opened: dict[TlsFiles, ServerTls] = field(default_factory=dict)
    """TLS by its files, which listeners share."""

    def add(
        self, address: Address, plane: Any, limit: int, own: TlsFiles | None = None, *, plain_text: bool = False
    ) -> None:
        """Add a plane to an address. `own` are its own TLS files; `plain_text`: it may do without TLS anywhere. Raises
        TlsError, or ValueError if planes on one address have different TLS.
        """
        tls = self._tls(address, own, plain_text)
        if address in self.planes and self.tls.get(address) is not tls:
            raise ValueError(f"the planes on port {address[1]} must all have TLS with the same files, or none")
        self.planes.setdefault(address, []).append(plane)
        self.limits[address] = max(limit, self.limits.get(address, 0))
        if tls is not None:
            self.tls[address] = tls

    def add_grpc(self, service: GrpcListener) -> None:
        """Add a gRPC service to its address. Raises TlsError or ValueError."""
        address = (service.host, service.port)
        if service.plain_text and not is_loopback(service.host):
            raise ValueError(f"port {service.port} of {service.host} must have TLS: it is not on loopback")
        tls = None if service.plain_text else self._tls(address, service.tls, plain_text=False)
        if self.grpc_tls.setdefault(address, tls) is not tls:
            raise ValueError(f"the gRPC services on port {service.port} must all have TLS with the same files, or none")
        self.grpc.setdefault(address, []).append(service)

    def _tls(self, address: Address, own: TlsFiles | None, plain_text: bool) -> ServerTls | None:
        files = own or self.tls_files
        if files is None:
            if not (plain_text or self.plain_text or is_loopback(address[0])):
                raise ValueError(PLAIN_TEXT.format(*address))
            return None
        if files not in self.opened:
            self.opened[files] = ServerTls(files)
        return self.opened[files]

    @property
    def shared(self) -> dict[Address, SharedPort]:
        """The application of each address."""
        return {address: SharedPort(planes) for address, planes in self.planes.items()}

    @property
    def endpoints(self) -> list[Listener]:
        """The addresses that the server binds, with their TLS."""
        return [Listener(*address, self.tls.get(address), self.settings.get(address, "")) for address in self.planes]

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
                self.grpc_tls[address],
                self.settings.get(address, ""),
            )
            for address, services in self.grpc.items()
        ]


def build_listeners(
    options: Options, dialects: Iterable[Dialect], setups: Iterable[Setup], services: Services, terminate: Terminate
) -> Listeners:
    """Build all planes and gRPC services, and start the dialects.

    Raises SetupError, TlsError or ValueError, and binds nothing.
    """
    setups = list(setups)
    listeners = Listeners(
        tls_files(options), options.allow_plain_text or options.behind_tls, settings_of_addresses(options, setups)
    )
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
                listeners.add_grpc(service)
    return listeners


def _add_plane(listeners: Listeners, options: Options, declared: PlaneListener, services: Services) -> None:
    # Client certificates of its own authorities replace API keys; otherwise keys are required as on every plane.
    certified = declared.tls is not None and bool(declared.tls.authorities)
    authenticator = declared.authenticator or Authenticator(
        not certified and options.api_key_required_on(declared.host), options.own_keys
    )
    table = RouteTable([declared.routes])
    plane = Plane(declared.name, table, services, authenticator, declared.answer_headers)
    listeners.add(
        (declared.host, declared.port), plane, declared.max_body_bytes, declared.tls, plain_text=declared.plain_text
    )
