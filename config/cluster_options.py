"""The settings of several processes and hosts: what web processes share, where workers listen, and by which certificate this host
is known to the others.

Without those of hosts workers listen on Unix sockets of this host. With an address beyond that, TLS with certificates is not optional.
"""

from __future__ import annotations

import re
from pathlib import Path
from urllib.parse import urlsplit

from pydantic import Field, SecretStr, field_validator, model_validator

from engine.network.credentials import Credentials
from inference.planes.environment import EnvironmentSettings
from management.launchers.network import Network

EVERYWHERE = ("0.0.0.0", "::")


class ClusterOptions(EnvironmentSettings):
    """Part of the server's settings."""

    worker_host: str = Field(
        "", description="Name or address by which other hosts reach workers of this one; empty is Unix sockets."
    )
    worker_ports: str = Field("21000-21999", description="Ports of these workers, first-last; each takes one.")
    cluster_authority: Path | None = Field(
        None, description="PEM file of the authority that signs the certificates of the cluster, and nothing else."
    )
    cluster_certificate: Path | None = Field(None, description="PEM file of this host's certificate of it.")
    cluster_key: Path | None = Field(None, description="PEM file of its key, which only its owner may read.")
    cluster_key_password_file: Path | None = Field(None, description="File with the password of an encrypted key.")

    cluster_revocations: Path | None = Field(
        None, description="PEM file of the authority's revocation list; certificates that it names are refused."
    )
    nixl_devices: str = Field(
        "",
        description="Network devices, separated by commas, over which `kv_transport` nixl may move KV blocks between hosts without encryption.",
    )

    redis_url: SecretStr = Field(
        SecretStr(""),
        description="redis://user:password@host:port/number, by which web processes count rates together; empty counts in each.",
    )
    redis_url_file: Path | None = Field(None, description="File with redis_url, instead of it.")

    @field_validator("redis_url")
    @classmethod
    def _is_of_redis(cls, value: SecretStr) -> SecretStr:
        try:
            parts = urlsplit(value.get_secret_value())
            number = parts.path.lstrip("/") or "0"
            known = parts.scheme == "unix" or (
                parts.scheme in ("redis", "rediss")
                and bool(parts.hostname)
                and (parts.port or 1) > 0
                and number.isdigit()
            )
        except ValueError:  # its text has the address, and may have the password
            known = False
        if value.get_secret_value() and not known:
            raise ValueError("an address is redis://user:password@host:port/number, rediss://... or unix:///path")
        return value

    @field_validator("nixl_devices")
    @classmethod
    def _are_devices(cls, value: str) -> str:
        if value and not re.fullmatch(r"[A-Za-z0-9_.:-]+(,[A-Za-z0-9_.:-]+)*", value):
            raise ValueError(f"{value!r} is no list of network devices, separated by commas")
        return value

    @field_validator("worker_host")
    @classmethod
    def _is_host(cls, value: str) -> str:
        if value and not re.fullmatch(r"[A-Za-z0-9._:-]+", value):
            raise ValueError(f"{value!r} is no host name or IP address")
        if value in EVERYWHERE:
            raise ValueError(
                f"{value} means every address of this host; other hosts need the one by which they reach it"
            )
        return value

    @field_validator("worker_ports")
    @classmethod
    def _are_ports(cls, value: str) -> str:
        matched = re.fullmatch(r"([0-9]{1,5})-([0-9]{1,5})", value)
        if matched is None or not 1 <= int(matched[1]) <= int(matched[2]) <= 65535:
            raise ValueError(f"{value!r} is no range of ports: first-last is expected, both from 1 to 65535")
        return value

    @model_validator(mode="after")
    def _cluster_is_whole(self) -> ClusterOptions:
        files = (self.cluster_authority, self.cluster_certificate, self.cluster_key)
        if any(files) and not all(files):
            raise ValueError("cluster_authority, cluster_certificate and cluster_key need each other")
        if self.cluster_key_password_file and not self.cluster_key:
            raise ValueError("cluster_key_password_file needs cluster_key")
        if self.cluster_revocations and not self.cluster_key:
            raise ValueError("cluster_revocations needs cluster_authority, cluster_certificate and cluster_key")
        if self.worker_host and not self.cluster_key:
            raise ValueError(
                "worker_host needs cluster_authority, cluster_certificate and cluster_key: workers never speak plain text over "
                "TCP; `cluster-certificates` makes these files"
            )
        if self.nixl_devices and not self.worker_host:
            raise ValueError("nixl_devices needs worker_host: workers on Unix sockets use no network")
        return self

    @property
    def network(self) -> Network:
        """Where workers listen. Raises CredentialsError if the files cannot be used."""
        first, _, last = self.worker_ports.partition("-")
        ports = range(int(first), int(last) + 1)
        if self.cluster_key is None:
            return Network()
        password = self.cluster_key_password_file
        credentials = Credentials(
            authority=_path(self.cluster_authority),
            certificate=_path(self.cluster_certificate),
            key=_path(self.cluster_key),
            password=_path(password),
            revoked=_path(self.cluster_revocations),
        )
        credentials.check()
        return Network(self.worker_host, ports, credentials, self.nixl_devices)


def _path(path: Path | None) -> str:
    """As workers need it, whose working folder is another; links are left, for what they lead to may be replaced."""
    return "" if path is None else str(path.absolute())
