"""The declaration of a dialect.

A dialect is a folder in `inference/dialects/` whose `dialect.py` has one `DIALECT`. A dialect with routes on the
front plane needs `name`, `title` and `front`. A dialect with settings, planes or gRPC services of its own also
declares `settings` and `configure`: the server reads the settings, calls `configure` before it builds anything, and
calls `Setup.start` when the services exist. No file outside the folder names the dialect, except the list in
`inference/dialects/__init__.py`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from inference.planes.environment import EnvironmentSettings

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    import grpc

    from inference.generation.generation import Observer
    from inference.http.auth import Authenticator
    from inference.http.exchange import Headers
    from inference.http.routing import RouteSet
    from inference.server.tls import TlsFiles
    from inference.services import Services

    Terminate = Callable[[float | None], None]


class SetupError(Exception):
    """A dialect's settings, or a file that they name, cannot be used; the text names the setting or the key."""


class DialectSettings(EnvironmentSettings):
    """Base class of a dialect's settings: each field is read from DRAGOMAN_<NAME> and checked at startup."""


class ServerOptions(Protocol):
    """The server settings that a dialect may use. Times are seconds."""

    @property
    def host(self) -> str:
        """The default bind address of planes."""

    @property
    def data_dir(self) -> Path:
        """The folder for generated secrets."""

    @property
    def max_body_bytes(self) -> int:
        """The largest request body."""

    @property
    def body_timeout_s(self) -> float:
        """How long a client may take to send a message."""

    @property
    def slow_client_timeout_s(self) -> float:
        """How long a client may leave its response unread."""


def no_headers(path: str, request_id: str) -> Headers:
    """The default of `PlaneListener.answer_headers`: no additional headers."""
    return []


@dataclass(frozen=True, slots=True)
class PlaneListener:
    """A plane of a dialect.

    Port 0 switches it off. Every response has the headers `answer_headers(path, request_id)`. `tls` are files of its own,
    None: the server's; with authorities in its own, a client needs a certificate and no API key. `plain_text`: its own
    configuration allows it to do without TLS on any address. `authenticator` checks a vendor's own keys; None: this server's
    API keys.
    """

    name: str
    host: str
    port: int
    routes: RouteSet
    max_body_bytes: int
    answer_headers: Callable[[str, str], Headers] = no_headers
    tls: TlsFiles | None = None
    plain_text: bool = False
    authenticator: Authenticator | None = None


@dataclass(frozen=True, slots=True)
class GrpcListener:
    """A gRPC service.

    Services with the same address share one server, its TLS and the larger of their limits. Port 0 switches it off. `tls` are
    files of its own, None: the server's. `plain_text`: it has no TLS even where the server has, on loopback only.
    """

    host: str
    port: int
    handler: grpc.GenericRpcHandler
    max_message_bytes: int
    max_connections: int
    tls: TlsFiles | None = None
    plain_text: bool = False


@dataclass(frozen=True, slots=True)
class Parts:
    """What a dialect adds to the running server, besides its routes on the front plane."""

    planes: Sequence[PlaneListener] = ()
    grpc: Sequence[GrpcListener] = ()
    observers: Sequence[Observer] = ()
    """Notified of the generations of all dialects."""


@dataclass(frozen=True, slots=True)
class WantedDeployment:
    """A deployment from the dialect's own configuration. The server creates it unless its command names a model."""

    source: str
    """A directory or hub id."""
    name: str
    engine_options: Mapping[str, Any]
    """Override the server's options."""
    adapters: Sequence[tuple[str, str]] = ()
    """Names and directories. Only these are registered: none that is found beside the model."""


def start_nothing(services: Services, terminate: Terminate) -> Parts:
    """The default of `Setup.start`, for a dialect that is only on the front plane."""
    return Parts()


@dataclass(frozen=True, slots=True)
class Setup:
    """A configured dialect, before anything is built."""

    hosts: Sequence[str] = ()
    """The addresses of its own planes. Clients may load adapters from any folder only if all addresses are loopback."""
    max_concurrent_requests: int = 0
    """Raises the server's limit to at least this number."""
    deployment: WantedDeployment | None = None
    start: Callable[[Services, Terminate], Parts] = start_nothing
    """Called once, before the first request.

    `terminate(force_after_s)` stops the server: None drains, a number kills it after that many seconds.
    """
    addresses: Mapping[str, tuple[str, int]] = field(default_factory=dict)
    """Hosts and ports of its own planes and services, by the setting that gives the port; port 0 is none."""
    tls: Sequence[TlsFiles] = ()
    """The TLS files of its own planes, likewise."""


def configure_nothing(settings: Any, server: ServerOptions) -> Setup:
    """The default of `Dialect.configure`, for a dialect without settings."""
    return Setup()


@dataclass(frozen=True, slots=True)
class Dialect:
    """One vendor's dialect. `configure(settings, server)` gets an instance of `settings` and may raise SetupError."""

    name: str
    """The folder's name, and the tag of its routes in the documentation."""
    title: str
    """The display name."""
    front: RouteSet | None = None
    settings: type[DialectSettings] | None = None
    configure: Callable[[Any, ServerOptions], Setup] = field(default=configure_nothing)

    def set_up(self, server: ServerOptions) -> Setup:
        """Read the settings from the environment and configure; raises pydantic's ValidationError or SetupError."""
        return self.configure(None if self.settings is None else self.settings(), server)
