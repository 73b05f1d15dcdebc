"""The addresses and TLS files of MindIE's three planes, from config.json and the environment. It opens no file."""

from __future__ import annotations

import ipaddress
from typing import TYPE_CHECKING

import structlog

from inference.dialects.mindie.config_file import MindieConfigError
from inference.server.tls import TlsFiles

if TYPE_CHECKING:
    from pathlib import Path

    from inference.dialects.mindie.config_file import MindieConfig
    from inference.dialects.mindie.environment import MindieEnvironment

logger = structlog.get_logger(__name__)
PORT_KEYS = {"service": "port", "management": "managementPort", "metrics": "metricsPort", "inter_comm": "interCommPort"}
"""The keys of `ServerConfig` that give the ports of listeners."""


def plane_addresses(
    environment: MindieEnvironment, config: MindieConfig | None, host: str
) -> dict[str, tuple[str, int]]:
    """The address of each plane by its name; `host` is the server's own.

    Port 0 switches a plane off. Raises MindieConfigError.
    """
    allow_all = config is not None and config.ServerConfig.allowAllZeroIpListening
    service = _checked("MIES_CONTAINER_IP", environment.address, allow_all)
    management = _checked("MIES_CONTAINER_MANAGEMENT_IP", environment.management_address, allow_all)
    if config is None:
        service = service or host
        return {
            "service": (service, environment.mindie_port),
            "management": (management or service, environment.mindie_management_port),
            "metrics": (management or service, environment.mindie_metrics_port),
        }
    server = config.ServerConfig
    service = service or server.ipAddress
    management = management or server.managementIpAddress or service
    return {
        "service": (service, server.port),
        "management": (management, server.managementPort or server.port),
        "metrics": (management, server.metricsPort),
    }


def port_setting(listener: str, config: MindieConfig | None) -> str:
    """What gives the port of a plane, or of `inter_comm`: a key of config.json, or a variable without one."""
    if config is None:
        return "DRAGOMAN_MINDIE_PORT" if listener == "service" else f"DRAGOMAN_MINDIE_{listener.upper()}_PORT"
    if listener == "management" and config.ServerConfig.managementPort is None:
        listener = "service"
    return f"config.json's ServerConfig.{PORT_KEYS[listener]}"


def _checked(name: str, address: str, allow_all: bool) -> str:
    """An address from the environment, checked by the file's rules; "" if there is none. Raises MindieConfigError."""
    try:
        unspecified = bool(address) and ipaddress.ip_address(address).is_unspecified
    except ValueError as error:
        raise MindieConfigError(f"{name}: {error}", of_environment=True) from error
    if unspecified and not allow_all:
        text = f"{name} {address} needs allowAllZeroIpListening to be true in config.json"
        raise MindieConfigError(text, of_environment=True)
    return address


def tls_files(config: MindieConfig | None, plane: str, path: Path | None) -> TlsFiles | None:
    """The plane's TLS files, or None without TLS; `path` is config.json's.

    The management and metrics planes use the service plane's files on the service plane's address. Raises MindieConfigError.
    """
    if config is None or path is None or not config.ServerConfig.httpsEnabled:
        return None
    server = config.ServerConfig
    root = path.resolve().parent.parent  # MindIE keeps the file in conf/; its paths are relative to the parent folder
    if plane == "service" or server.managementIpAddress in ("", server.ipAddress):
        files = [server.tlsCaFile] if isinstance(server.tlsCaFile, str) else server.tlsCaFile
        authorities = [root / server.tlsCaPath / name for name in files]
        certificate, key, password = server.tlsCert, server.tlsPk, server.tlsPkPwd
        revoked = _revoked(root / server.tlsCrlPath, server.tlsCrlFiles)
    elif plane == "management":
        authorities = [root / server.tlsCaPath / name for name in server.managementTlsCaFile]
        certificate, key = server.managementTlsCert, server.managementTlsPk
        password = server.managementTlsPkPwd
        revoked = _revoked(root / server.managementTlsCrlPath, server.managementTlsCrlFiles)
    else:
        authorities = [root / server.tlsCaPath / name for name in server.metricsTlsCaFile]
        certificate, key, password = server.metricsTlsCert, server.metricsTlsPk, server.metricsTlsPkPwd
        revoked = _revoked(root / server.metricsTlsCrlPath, server.metricsTlsCrlFiles)
    if not authorities:
        raise MindieConfigError(f"ServerConfig.{plane}TlsCaFile must list at least one file")
    secret = root / password if password else None
    return TlsFiles(root / certificate, root / key, tuple(authorities), tuple(revoked), secret)


def inter_comm(environment: MindieEnvironment, config: MindieConfig | None, host: str) -> tuple[str, int] | None:
    """The address of calls between instances, on the service plane's `host`; None: this server is no instance with a role.

    Without TLS the address must be on loopback. Raises MindieConfigError.
    """
    if config is None:
        mode, port, encrypted = environment.mindie_infer_mode, environment.mindie_inter_comm_port, False
        rule = "DRAGOMAN_MINDIE_INFER_MODE dmi needs a config.json with interCommTLSEnabled"
    else:
        server = config.ServerConfig
        mode, port, encrypted = server.inferMode, server.interCommPort, server.interCommTLSEnabled
        rule = "ServerConfig.interCommTLSEnabled must be true"
    if mode != "dmi":
        return None
    if not encrypted and not _is_loopback(host):
        raise MindieConfigError(f"{rule} where the service plane is not on loopback, got {host}")
    return host, port


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:  # a name
        return host == "localhost"


def inter_comm_tls(config: MindieConfig | None, path: Path | None) -> TlsFiles | None:
    """The TLS files of calls between instances, or None without TLS."""
    if config is None or path is None or not config.ServerConfig.interCommTLSEnabled:
        return None
    server, root = config.ServerConfig, path.resolve().parent.parent
    return TlsFiles(
        root / server.interCommTlsCert,
        root / server.interCommPk,
        tuple(root / server.interCommTlsCaPath / name for name in server.interCommTlsCaFiles),
        tuple(_revoked(root / server.interCommTlsCrlPath, server.interCommTlsCrlFiles)),
        root / server.interCommPkPwd if server.interCommPkPwd else None,
    )


def _revoked(folder: Path, names: list[str] | None) -> list[Path]:
    """The revocation lists; if config.json names none, the file with MindIE's default name if it exists."""
    if names is not None:
        return [folder / name for name in names]
    usual = folder / "server_crl.pem"
    if usual.is_file():
        return [usual]
    logger.warning("revocation list not found", expected=str(usual))
    return []
