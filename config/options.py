"""The server's own settings, from the environment as DRAGOMAN_<NAME>, checked at startup; a dialect's settings are in
its folder.
"""

from __future__ import annotations

import ipaddress
import re
import socket
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlsplit

from cryptography.fernet import Fernet
from pydantic import Field, SecretStr, ValidationInfo, create_model, field_validator, model_validator

from config import installation
from config.cluster_options import ClusterOptions
from config.installation import DEMO_MODEL, PROJECT, default_data_dir
from config.secret_files import read_secret, with_files
from engine import faults
from engine.config import OPTIONS
from inference.planes.environment import EnvironmentSettings, ModelSource
from management.launchers import LAUNCHERS

MOST_PRIORITY = 1000
WILDCARDS = ("0.0.0.0", "::")
"""Addresses that mean every address of this machine."""
MAX_S = 604_800
"""Seconds of the longest time, a week: timers and gRPC count milliseconds in 32 bits."""
MIN_SESSION_KEY = 32
"""Characters of a key that signs sessions."""

EngineSettings: Any = create_model(
    "EngineSettings",
    __base__=EnvironmentSettings,
    **{
        field.name: (
            field.type,
            Field(
                field.default, ge=field.option.minimum, le=field.option.maximum, description=field.option.description
            ),
        )
        for field in OPTIONS.values()
        if field.option.setting
    },
)
"""One setting for each option of `engine.config` that has one."""


class Options(EngineSettings, ClusterOptions):
    """The server's settings. Times are seconds."""

    host: str = Field("127.0.0.1", description="Address that every plane binds.")
    front_port: int = Field(8000, ge=1, le=65535, description="Port of the front plane, which most dialects share.")
    control_port: int = Field(8080, ge=1, le=65535, description="Port of the admin; may be the front port.")
    data_dir: Path = Field(
        default_factory=default_data_dir, description="Folder for the database, sockets and generated secrets."
    )
    runtime_dir: Path | None = Field(
        None, description="Folder of sockets that `web` and `reconcile` share; unset is one per user and data_dir."
    )
    database_url: str = Field("", description="postgresql://user:password@host/name; empty is SQLite in data_dir.")
    database_url_file: Path | None = Field(None, description="File with database_url, instead of it.")
    secrets_key: SecretStr = Field(
        SecretStr(""),
        description="Key that encrypts stored secrets, 32 bytes as url-safe base64; empty is a generated file in data_dir.",
    )
    secrets_key_file: Path | None = Field(None, description="File with secrets_key, instead of it.")
    session_key_file: Path | None = Field(
        None, description="File with the key that signs the admin's sessions; unset is a generated file in data_dir."
    )
    model: ModelSource = Field(str(DEMO_MODEL), description="Directory or hub id that `serve` deploys.")
    launcher: str = Field("local", description="Launcher of engine workers: " + ", ".join(LAUNCHERS) + ".")
    require_api_key: bool | None = Field(None, description="Ask for API keys; unset asks unless bound to loopback.")
    api_keys: list[SecretStr] = Field(
        [], description="Keys that open inference routes and metrics, besides those of `createkey`."
    )
    api_keys_file: Path | None = Field(None, description="File with api_keys, one a line, instead of them.")
    allowed_hosts: list[str] = Field([], description="Further host names of the server; * is any.")
    allowed_origins: list[str] = Field(
        [], description="Foreign origins whose pages may call the inference planes; * is any."
    )
    allowed_methods: list[str] = Field(["*"], description="HTTP methods of these pages; * is any.")
    allowed_headers: list[str] = Field(["*"], description="Request headers of these pages; * is any.")
    allow_credentials: bool = Field(
        False, description="Whether these pages may send cookies and certificates; needs named origins."
    )
    show_cached_tokens: bool = Field(
        False, description="Whether OpenAI's usage counts the prompt tokens that came from the prefix cache."
    )
    show_adapter_paths: bool = Field(
        False, description="Whether the model card of an adapter shows its directory as root, instead of its name."
    )
    usage_end_users: Literal["plain", "hash", "off"] = Field("plain", description="How usage names clients' users.")
    usage_keep_days: int = Field(400, ge=1, le=3650, description="Days for which the usage is kept.")
    behind_tls: bool = Field(
        False, description="A proxy terminates TLS: cookies are Secure, X-Forwarded-Proto and -For are trusted."
    )
    tls_certificate: Path | None = Field(
        None, description="PEM file of the certificate chain of every plane and gRPC service; unset is plain text."
    )
    tls_key: Path | None = Field(None, description="PEM file of its key, which only its owner may read.")
    tls_key_password_file: Path | None = Field(None, description="File with the password of an encrypted key.")
    tls_client_authorities: list[Path] = Field(
        [], description="PEM files of authorities; with one, every client needs a certificate."
    )
    tls_revocation_lists: list[Path] = Field([], description="PEM files of these authorities' revocation lists.")
    allow_plain_text: bool = Field(
        False, description="Whether planes may be served beyond loopback without TLS, on a trusted network."
    )
    adapter_roots: list[Path] | None = Field(
        None, description="Folders from which clients may load adapters; unset is any folder if bound to loopback."
    )
    model_roots: list[Path] | None = Field(
        None,
        description="Folders whose models clients of the control plane may deploy; unset is any folder if bound to loopback.",
    )
    public_url: str = Field(
        "", description="Address at which clients reach the front plane; empty is http://HOST:FRONT_PORT."
    )
    max_adapter_bytes: int = Field(
        4 << 30, ge=1 << 20, le=1 << 40, description="Largest adapter_model.safetensors that is read."
    )
    max_concurrent_requests: int = Field(256, ge=1, le=65536, description="Concurrent requests; more are refused.")
    max_requests_per_tenant: int = Field(
        0,
        ge=0,
        description="Concurrent requests of one API key, or of one gRPC connection without keys; 0 is 3/4 of all.",
    )
    max_held_requests_per_deployment: int = Field(
        64, ge=0, le=65536, description="Requests that wait for a deployment without a ready worker; more are refused."
    )
    max_held_requests: int = Field(256, ge=0, le=65536, description="The same for all deployments together.")
    hold_s: float = Field(
        600,
        ge=0,
        le=MAX_S,
        description="Seconds that a request waits for a first worker, if its own deadline is not earlier.",
    )
    max_body_bytes: int = Field(2_000_000, ge=1024, le=1 << 30, description="Largest request body in bytes.")
    max_connections: int = Field(4096, ge=1, le=1 << 20, description="Concurrent HTTP connections to one address.")
    parse_special_tokens: bool = Field(
        True, description="Whether names of special tokens (<|im_end|>) in a client's text become these tokens."
    )
    request_timeout_s: float = Field(
        600, gt=0, le=MAX_S, description="Seconds that a request may take; clients can only ask for less."
    )
    token_timeout_s: float = Field(
        300, ge=0, le=MAX_S, description="Seconds between two tokens after which a request is ended; 0 never ends one."
    )
    inference_objectives: dict[str, int] = Field(
        {},
        description="Priority of each name in x-gateway-inference-objective; greater ones are served first, others are 0.",
    )
    max_idempotency_bytes: int = Field(
        64 << 20, ge=0, le=1 << 40, description="Memory for responses kept by Idempotency-Key; 0 ignores the header."
    )
    replay_wait_s: float = Field(
        30,
        ge=0,
        le=MAX_S,
        description="Seconds that a running request waits for another worker after its own has ended.",
    )
    headers_timeout_s: float = Field(
        10, gt=0, le=MAX_S, description="Seconds that a client may take to send a request's headers."
    )
    body_timeout_s: float = Field(
        60, gt=0, le=MAX_S, description="Seconds that a client may take to send a request's body."
    )
    slow_client_timeout_s: float = Field(
        30, gt=0, le=MAX_S, description="Seconds that a client may leave its stream unread."
    )
    linger_s: float = Field(
        5,
        ge=0,
        le=MAX_S,
        description="Seconds after SIGTERM in which a `web` process answers requests on open connections as before.",
    )
    worker_lease_s: float = Field(
        30, ge=15, le=3600, description="Seconds that workers of `reconcile` run on while no reconciler leads."
    )
    drain_s: float = Field(30, ge=0, le=MAX_S, description="Seconds that running requests may continue after SIGTERM.")
    otlp_traces_endpoint: str = Field(
        "", description="URL to which traces are exported (OTLP over HTTP); empty leaves it to OTEL_EXPORTER_OTLP_*."
    )
    log_format: Literal["console", "json"] = Field("console", description="How log lines are written.")
    faults: str = Field("", description="Fault points of tests, which act only with enable_faults.")
    enable_faults: bool = Field(
        False, description="Whether fault points act; refused beyond loopback and in an installed package."
    )

    @field_validator("database_url")
    @classmethod
    def _is_of_postgresql(cls, value: str) -> str:
        try:
            parts = urlsplit(value)
            known = not value or (parts.scheme in ("postgresql", "postgres") and (parts.port or 1) > 0)
        except ValueError:  # its text has the address, and may have the password
            known = False
        if not known:
            raise ValueError("an address is postgresql://user:password@host:port/name, with special characters as %XX")
        return value

    @field_validator("faults")
    @classmethod
    def _are_faults(cls, value: str) -> str:
        faults.parse(value)
        return value

    @model_validator(mode="after")
    def _releases_have_no_faults(self) -> Options:
        if self.enable_faults and not PROJECT.is_file():
            raise ValueError("enable_faults is for tests in a source tree, and refused in an installed package")
        self.check_faults([self.host])
        return self

    @model_validator(mode="before")
    @classmethod
    def _read_files(cls, values: Any) -> Any:
        return with_files(values) if isinstance(values, dict) else values

    @field_validator("allowed_hosts", "allowed_origins")
    @classmethod
    def _lower_case(cls, values: list[str]) -> list[str]:
        return [value.lower().rstrip("/") for value in values]

    @field_validator("api_keys")
    @classmethod
    def _are_keys(cls, values: list[SecretStr]) -> list[SecretStr]:
        if not all(re.fullmatch(r"[!-~]+", value.get_secret_value()) for value in values):
            raise ValueError("a key must have at least one character, all of them visible ASCII")
        return values

    @field_validator("secrets_key")
    @classmethod
    def _encrypts(cls, value: SecretStr) -> SecretStr:
        try:
            for key in filter(None, value.get_secret_value().split(",")):
                Fernet(key.strip())
        except ValueError as error:  # its text has no part of the key, but does not say what a key is
            raise ValueError("a key is 32 bytes as url-safe base64, which are 44 characters") from error
        return value

    @field_validator("inference_objectives")
    @classmethod
    def _are_priorities(cls, values: dict[str, int]) -> dict[str, int]:
        if not all(abs(value) <= MOST_PRIORITY for value in values.values()):
            raise ValueError(f"a priority must be between -{MOST_PRIORITY} and {MOST_PRIORITY}")
        return values

    @field_validator("launcher")
    @classmethod
    def _is_known(cls, value: str) -> str:
        if value not in LAUNCHERS:
            raise ValueError(f"there is no such launcher; known: {', '.join(LAUNCHERS)}")
        return value

    @field_validator("allowed_origins")
    @classmethod
    def _are_origins(cls, values: list[str]) -> list[str]:
        for value in values:
            if value != "*" and not re.fullmatch(r"[a-z][a-z0-9+.-]*://[^/\s]+|null", value):
                raise ValueError("an origin is scheme://host, with a port where it is not the scheme's own")
        return values

    @field_validator("allowed_methods", "allowed_headers")
    @classmethod
    def _are_tokens(cls, values: list[str], info: ValidationInfo) -> list[str]:
        for value in values:
            if not re.fullmatch(r"[A-Za-z0-9!#$%&'*+.^_`|~-]+", value):
                raise ValueError("a method or a header has letters, digits and !#$%&'*+.^_`|~-")
        return [value.upper() if info.field_name == "allowed_methods" else value.lower() for value in values]

    @model_validator(mode="after")
    def _credentials_need_named_origins(self) -> Options:
        if self.allow_credentials and "*" in self.allowed_origins:
            raise ValueError("allow_credentials needs named origins: allowed_origins must not be *")
        return self

    @model_validator(mode="after")
    def _tls_is_whole(self) -> Options:
        if (self.tls_certificate is None) != (self.tls_key is None):
            raise ValueError("tls_certificate and tls_key need each other")
        others = (self.tls_key_password_file, self.tls_client_authorities, self.tls_revocation_lists)
        if self.tls_certificate is None and any(others):
            raise ValueError("the other settings of TLS need tls_certificate and tls_key")
        if self.tls_revocation_lists and not self.tls_client_authorities:
            raise ValueError("tls_revocation_lists needs tls_client_authorities")
        return self

    @model_validator(mode="after")
    def _session_key_is_long(self) -> Options:
        if self.session_key is not None and len(self.session_key) < MIN_SESSION_KEY:
            raise ValueError(f"DRAGOMAN_SESSION_KEY_FILE: a key has at least {MIN_SESSION_KEY} characters")
        return self

    @field_validator("otlp_traces_endpoint")
    @classmethod
    def _is_url(cls, value: str) -> str:
        if value and not re.fullmatch(r"https?://[^/?#\s]+(/\S*)?", value):
            raise ValueError("http(s)://host:port/v1/traces is expected; gRPC is not spoken")
        return value

    @field_validator("public_url")
    @classmethod
    def _is_base_url(cls, value: str) -> str:
        if value and not re.fullmatch(r"https?://[^/?#\s]+(/[^?#\s]*)?", value):
            raise ValueError("http(s)://host is expected, with a port and a path where they are needed")
        return value.rstrip("/")

    @property
    def front_url(self) -> str:
        """The front plane's address for clients, without a trailing slash."""
        if self.public_url:
            return self.public_url
        host = socket.gethostname() if self.host in WILDCARDS else self.host
        return f"{self.scheme}://{f'[{host}]' if ':' in host else host}:{self.front_port}"

    @property
    def scheme(self) -> str:
        """The scheme of the planes' own addresses."""
        return "http" if self.tls_certificate is None else "https"

    @property
    def session_key(self) -> str | None:
        """The key of `session_key_file`. Raises ValueError if it cannot be read."""
        if self.session_key_file is None:
            return None
        return read_secret(self.session_key_file, "DRAGOMAN_SESSION_KEY_FILE")

    @property
    def own_keys(self) -> list[str]:
        """The texts of `api_keys`."""
        return [key.get_secret_value() for key in self.api_keys]

    @property
    def own_hosts(self) -> frozenset[str]:
        """Host names with a dot that name this server."""
        return frozenset({self.host.lower(), socket.gethostname().lower(), *self.allowed_hosts})

    @property
    def engine_options(self) -> dict[str, Any]:
        """The engine options of the deployment that `serve` creates."""
        return {name: getattr(self, name) for name in EngineSettings.model_fields}

    @property
    def api_key_required(self) -> bool:
        """Whether inference routes require an API key."""
        return self.api_key_required_on(self.host)

    def check_faults(self, hosts: list[str]) -> None:
        """Raise ValueError if fault points act and one of these addresses can be reached by others."""
        exposed = [host for host in hosts if not is_loopback(host)]
        if self.enable_faults and exposed:
            raise ValueError(f"enable_faults is refused: {exposed[0]} can be reached from other machines")

    def shared_dir(self) -> Path:
        """The folder of sockets that all processes of this server share. Raises OSError."""
        if self.runtime_dir is None:
            return installation.runtime_dir(self.data_dir)
        self.runtime_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        return self.runtime_dir

    def api_key_required_on(self, host: str) -> bool:
        """The same for a plane with an address of its own."""
        if self.require_api_key is None:
            return bool(self.api_keys) or not is_loopback(host)
        return self.require_api_key

    def allowed_adapter_roots(self, hosts: list[str]) -> list[Path] | None:
        """The folders that clients of planes on these addresses may load adapters from: the setting's folders.

        Without the setting: every folder (None) if all addresses are loopback, else no folder.
        """
        if self.adapter_roots is not None or all(map(is_loopback, hosts)):
            return self.adapter_roots
        return []

    @property
    def allowed_model_roots(self) -> list[Path] | None:
        """The folders that clients of the control plane may deploy models from, by the same rule."""
        if self.model_roots is not None or is_loopback(self.host):
            return self.model_roots
        return []


def is_loopback(host: str) -> bool:
    """Whether an address can only be reached from this machine."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:  # a name
        return host == "localhost"


@lru_cache
def get_options() -> Options:
    """The options of this process, read once."""
    return Options()
