"""What a dialect declares about itself.

A dialect is a folder in `inference/dialects/` whose `dialect.py` has one `DIALECT`. A dialect with routes on the front plane
needs `name`, `title` and `front`. A dialect with settings, planes or gRPC services of its own also declares `settings` and
`configure`: the server reads the settings, calls `configure` before it builds anything, and calls `Setup.start` when the
services exist. No file outside the folder names the dialect, except the list in `inference/dialects/__init__.py`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from pydantic_settings import BaseSettings, SettingsConfigDict

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    import grpc

    from inference.generation.generation import Observer
    from inference.http.exchange import Headers
    from inference.http.routing import RouteSet
    from inference.server.tls import TlsFiles
    from inference.services import Services

    Terminate = Callable[[float | None], None]


class SetupError(Exception):
    """A dialect's settings, or a file that they name, cannot be used; the text names the setting or the key."""


class DialectSettings(BaseSettings):
    """The base of a dialect's settings: each field is read from DRAGOMAN_<NAME> and checked at start."""

    model_config = SettingsConfigDict(env_prefix="DRAGOMAN_", extra="forbid", frozen=True, populate_by_name=True)


class ServerOptions(Protocol):
    """The server's own settings that a dialect may use. Times are seconds."""

    @property
    def host(self) -> str:
        """The address that planes bind unless they have one of their own."""

    @property
    def max_body_bytes(self) -> int:
        """The longest request body."""

    @property
    def body_timeout_s(self) -> float:
        """How long a client may take to send a message."""

    @property
    def slow_client_timeout_s(self) -> float:
        """How long a client may leave its answer unread."""


def no_headers(path: str, request_id: str) -> Headers:
    """Nothing beside what each answer sets itself."""
    return []


@dataclass(frozen=True, slots=True)
class PlaneListener:
    """A plane of a dialect's own. Port 0 switches it off.

    Every answer carries `answer_headers(path, request_id)`. With `tls`, a client needs a certificate and no API key.
    """

    name: str
    host: str
    port: int
    routes: RouteSet
    max_body_bytes: int
    answer_headers: Callable[[str, str], Headers] = no_headers
    tls: TlsFiles | None = None


@dataclass(frozen=True, slots=True)
class GrpcListener:
    """A gRPC service. Services with the same address share one server and its larger limits. Port 0 switches it off."""

    host: str
    port: int
    handler: grpc.GenericRpcHandler
    max_message_bytes: int
    max_connections: int


@dataclass(frozen=True, slots=True)
class Parts:
    """What a dialect adds to the running server, beside its routes on the front plane."""

    planes: Sequence[PlaneListener] = ()
    grpc: Sequence[GrpcListener] = ()
    observers: Sequence[Observer] = ()
    """They see the generations of all dialects."""


@dataclass(frozen=True, slots=True)
class WantedDeployment:
    """A deployment that the dialect's own configuration names. The server makes it unless its command names a model."""

    source: str
    """A directory or hub id."""
    name: str
    engine_options: Mapping[str, Any]
    """They override the server's."""
    adapters: Sequence[tuple[str, str]] = ()
    """Names and directories."""


def start_nothing(services: Services, terminate: Terminate) -> Parts:
    """For a dialect that is on the front plane alone."""
    return Parts()


@dataclass(frozen=True, slots=True)
class Setup:
    """A dialect under its settings, before anything is built."""

    hosts: Sequence[str] = ()
    """The addresses of its own planes. Clients may name any adapter folder only where all addresses are loopback."""
    max_concurrent_requests: int = 0
    """Raises the server's limit to this number where it is lower."""
    deployment: WantedDeployment | None = None
    start: Callable[[Services, Terminate], Parts] = start_nothing
    """Called once, before the first request. `terminate(force_after_s)` ends the server: None lets running requests
    finish, a number kills the process after so many seconds.
    """


def configure_nothing(settings: Any, server: ServerOptions) -> Setup:
    """For a dialect without settings of its own."""
    return Setup()


@dataclass(frozen=True, slots=True)
class Dialect:
    """One vendor's wire language. `configure(settings, server)` gets an instance of `settings` and may raise SetupError."""

    name: str
    """The folder's name, and the tag of its routes in the documentation."""
    title: str
    """The name for people."""
    front: RouteSet | None = None
    settings: type[DialectSettings] | None = None
    configure: Callable[[Any, ServerOptions], Setup] = field(default=configure_nothing)

    def set_up(self, server: ServerOptions) -> Setup:
        """Read the settings from the environment; raises pydantic's ValidationError or SetupError."""
        return self.configure(None if self.settings is None else self.settings(), server)
