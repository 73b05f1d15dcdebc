"""The server's own settings, from the environment as DRAGOMAN_<NAME>, checked at startup; a dialect's settings are in
its folder.
"""

from __future__ import annotations

import ipaddress
import re
import socket
from functools import lru_cache
from pathlib import Path
from typing import Any

from pydantic import Field, SecretStr, ValidationInfo, create_model, field_validator, model_validator
from pydantic_settings import BaseSettings, SettingsConfigDict

from config import installation
from config.installation import DEMO_MODEL, default_data_dir
from engine.config import OPTIONS
from management.launchers import LAUNCHERS

WILDCARDS = ("0.0.0.0", "::")
"""Addresses that mean every address of this machine."""

EngineSettings: Any = create_model(
    "EngineSettings",
    __base__=BaseSettings,
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


class Options(EngineSettings):
    """The server's settings. Times are seconds."""

    model_config = SettingsConfigDict(env_prefix="DRAGOMAN_", extra="forbid", frozen=True, populate_by_name=True)

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
    secrets_key: SecretStr = Field(
        SecretStr(""),
        description="Key that encrypts stored secrets, 32 bytes as url-safe base64; empty is a generated file in data_dir.",
    )
    model: str = Field(str(DEMO_MODEL), description="Directory or hub id that `serve` deploys.")
    launcher: str = Field("local", description="Launcher of engine workers: " + ", ".join(LAUNCHERS) + ".")
    require_api_key: bool | None = Field(None, description="Ask for API keys; unset asks unless bound to loopback.")
    api_keys: list[SecretStr] = Field(
        [], description="Keys that open inference routes and metrics, besides those of `createkey`."
    )
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
    behind_tls: bool = Field(
        False, description="A proxy terminates TLS: cookies are Secure, X-Forwarded-Proto and -For are trusted."
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
        600, ge=0, description="Seconds that a request waits for a first worker, if its own deadline is not earlier."
    )
    max_body_bytes: int = Field(2_000_000, ge=1024, le=1 << 30, description="Largest request body in bytes.")
    max_connections: int = Field(4096, ge=1, le=1 << 20, description="Concurrent HTTP connections to one address.")
    parse_special_tokens: bool = Field(
        True, description="Whether names of special tokens (<|im_end|>) in a client's text become these tokens."
    )
    request_timeout_s: float = Field(600, gt=0, description="Seconds that a request may take.")
    replay_wait_s: float = Field(
        30, ge=0, description="Seconds that a running request waits for another worker after its own has ended."
    )
    headers_timeout_s: float = Field(
        10, gt=0, description="Seconds that a client may take to send a request's headers."
    )
    body_timeout_s: float = Field(60, gt=0, description="Seconds that a client may take to send a request's body.")
    slow_client_timeout_s: float = Field(30, gt=0, description="Seconds that a client may leave its stream unread.")
    linger_s: float = Field(
        5,
        ge=0,
        description="Seconds after SIGTERM in which a `web` process answers requests on open connections as before.",
    )
    worker_lease_s: float = Field(
        30, ge=5, le=3600, description="Seconds that workers of `reconcile` run on while no reconciler leads."
    )
    drain_s: float = Field(30, ge=0, description="Seconds that running requests may continue after SIGTERM.")
    log_format: str = Field("console", pattern="^(console|json)$", description="How log lines are written.")

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

    @field_validator("launcher")
    @classmethod
    def _is_known(cls, value: str) -> str:
        if value not in LAUNCHERS:
            raise ValueError(f"{value!r} is no launcher; known: {', '.join(LAUNCHERS)}")
        return value

    @field_validator("allowed_origins")
    @classmethod
    def _are_origins(cls, values: list[str]) -> list[str]:
        for value in values:
            if value != "*" and not re.fullmatch(r"[a-z][a-z0-9+.-]*://[^/\s]+|null", value):
                raise ValueError(f"{value!r} is no origin: scheme://host, with a port where it is not the scheme's own")
        return values

    @field_validator("allowed_methods", "allowed_headers")
    @classmethod
    def _are_tokens(cls, values: list[str], info: ValidationInfo) -> list[str]:
        for value in values:
            if not re.fullmatch(r"[A-Za-z0-9!#$%&'*+.^_`|~-]+", value):
                raise ValueError(f"{value!r} is no name of a method or a header")
        return [value.upper() if info.field_name == "allowed_methods" else value.lower() for value in values]

    @model_validator(mode="after")
    def _credentials_need_named_origins(self) -> Options:
        if self.allow_credentials and "*" in self.allowed_origins:
            raise ValueError("allow_credentials needs named origins: allowed_origins must not be *")
        return self

    @field_validator("public_url")
    @classmethod
    def _is_base_url(cls, value: str) -> str:
        if value and not re.fullmatch(r"https?://[^/?#\s]+(/[^?#\s]*)?", value):
            raise ValueError(f"{value!r} is no address: http(s)://host, with a port and a path where they are needed")
        return value.rstrip("/")

    @property
    def front_url(self) -> str:
        """The front plane's address for clients, without a trailing slash."""
        if self.public_url:
            return self.public_url
        host = socket.gethostname() if self.host in WILDCARDS else self.host
        return f"http://{f'[{host}]' if ':' in host else host}:{self.front_port}"

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
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


@lru_cache
def get_options() -> Options:
    """The options of this process, read once."""
    return Options()
