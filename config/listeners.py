"""Which planes listen where: addresses from the options and from MindIE's config.json, planes that share one, their TLS."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import structlog

from config.asgi import ControlPlane, SharedPort
from config.mindie import checked_address, wire_settings
from inference.dialects.mindie import routes
from inference.dialects.mindie.state import MindieState
from inference.http.auth import Authenticator
from inference.planes.front import front_plane
from inference.server.plane_server import Listener
from inference.server.tls import MutualContextFactory, TlsFiles

if TYPE_CHECKING:
    from collections.abc import Callable

    from config.mindie import MindieConfig
    from config.options import Options
    from inference.services import Services

logger = structlog.get_logger(__name__)


@dataclass(slots=True)
class Listeners:
    """Planes by address, each address' TLS and longest body."""

    planes: dict[tuple[str, int], list[Any]] = field(default_factory=dict)
    tls: dict[tuple[str, int], MutualContextFactory] = field(default_factory=dict)
    limits: dict[tuple[str, int], int] = field(default_factory=dict)
    mindie: MindieState | None = None

    def add(self, address: tuple[str, int], plane: Any, limit: int, tls: MutualContextFactory | None = None) -> None:
        """Let a plane listen there; the first plane of an address decides about TLS."""
        if address in self.planes and (address in self.tls) != (tls is not None):
            raise ValueError(f"the planes on port {address[1]} must all have TLS, or none")
        self.planes.setdefault(address, []).append(plane)
        self.limits[address] = max(limit, self.limits.get(address, 0))
        if tls is not None:
            self.tls.setdefault(address, tls)

    @property
    def shared(self) -> dict[tuple[str, int], SharedPort]:
        """What each address serves."""
        return {address: SharedPort(planes) for address, planes in self.planes.items()}

    @property
    def endpoints(self) -> list[Listener]:
        """What the server binds."""
        return [Listener(host, port, self.tls.get((host, port))) for host, port in self.planes]


def build_listeners(
    options: Options, config: MindieConfig | None, services: Services, terminate: Callable[[float | None], None]
) -> Listeners:
    """All planes; raises MindieConfigError, TlsError or ValueError, and binds nothing."""
    listeners = Listeners()
    listeners.add((options.host, options.front_port), front_plane(services), options.max_body_bytes)
    listeners.add((options.host, options.control_port), ControlPlane(), options.max_body_bytes)
    if config is not None or options.mindie_port:
        _add_mindie(listeners, options, config, services, terminate)
    return listeners


def _add_mindie(
    listeners: Listeners,
    options: Options,
    config: MindieConfig | None,
    services: Services,
    terminate: Callable[[float | None], None],
) -> None:
    addresses = mindie_addresses(options, config)
    management = "{}:{}".format(*addresses["management"])
    state = MindieState(wire_settings(config, management), services.router, terminate)
    services.generator.observers += [state.latency, state.metrics]
    limit = state.settings.max_request_bytes
    factories = {
        "service": routes.service_plane,
        "management": routes.management_plane,
        "metrics": routes.metrics_plane,
    }
    for name, make in factories.items():
        host, port = addresses[name]
        if not port:
            continue
        tls = _tls(config, name, options.mindie_config)
        # A client's certificate is its key; without certificates, keys are asked for as on every plane.
        authenticator = Authenticator(tls is None and options.api_key_required_on(host))
        listeners.add((host, port), make(services, state, authenticator), limit, tls)
    listeners.mindie = state


def mindie_addresses(options: Options, config: MindieConfig | None) -> dict[str, tuple[str, int]]:
    """The three planes' addresses; port 0 is a plane that is switched off."""
    allow_all = config is not None and config.ServerConfig.allowAllZeroIpListening
    service = checked_address("MIES_CONTAINER_IP", options.mindie_address, allow_all)
    management = checked_address("MIES_CONTAINER_MANAGEMENT_IP", options.mindie_management_address, allow_all)
    if config is None:
        service = service or options.host
        return {
            "service": (service, options.mindie_port),
            "management": (management or service, options.mindie_management_port),
            "metrics": (management or service, options.mindie_metrics_port),
        }
    server = config.ServerConfig
    service = service or server.ipAddress
    management = management or server.managementIpAddress or service
    return {
        "service": (service, server.port),
        "management": (management, server.managementPort or server.port),
        "metrics": (management, server.metricsPort),
    }


def _tls(config: MindieConfig | None, plane: str, path: Path | None) -> MutualContextFactory | None:
    """The plane's own certificates; the management and metrics planes use the service's on the service's address."""
    if config is None or path is None or not config.ServerConfig.httpsEnabled:
        return None
    server = config.ServerConfig
    root = path.resolve().parent.parent  # MindIE keeps the file in conf/ and names paths beside that folder
    if plane == "service" or server.managementIpAddress in ("", server.ipAddress):
        files = [server.tlsCaFile] if isinstance(server.tlsCaFile, str) else server.tlsCaFile
        authorities = [root / server.tlsCaPath / name for name in files]
        certificate, key = server.tlsCert, server.tlsPk
        revoked = _revoked(root / server.tlsCrlPath, server.tlsCrlFiles)
    elif plane == "management":
        authorities = [root / server.tlsCaPath / name for name in server.managementTlsCaFile]
        certificate, key = server.managementTlsCert, server.managementTlsPk
        revoked = _revoked(root / server.managementTlsCrlPath, server.managementTlsCrlFiles)
    else:
        authorities = [root / server.tlsCaPath / name for name in server.metricsTlsCaFile]
        certificate, key = server.metricsTlsCert, server.metricsTlsPk
        revoked = _revoked(root / server.metricsTlsCrlPath, server.metricsTlsCrlFiles)
    return MutualContextFactory(TlsFiles(root / certificate, root / key, tuple(authorities), tuple(revoked)))


def _revoked(folder: Path, names: list[str] | None) -> list[Path]:
    """The lists of revoked certificates; where the file names none, MindIE's own name if it is there."""
    if names is not None:
        return [folder / name for name in names]
    usual = folder / "server_crl.pem"
    if usual.is_file():
        return [usual]
    logger.warning("no list of revoked certificates", expected=str(usual))
    return []
