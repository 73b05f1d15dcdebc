"""The checks of the network: ports, certificates and Redis."""

from __future__ import annotations

import asyncio
import datetime
import os
import socket
from contextlib import suppress
from typing import TYPE_CHECKING

import psutil
from cryptography import x509

from config.doctor.finding import Finding, error, ok, warning
from config.shared_rates import RedisMissing, ledger_of
from inference.admission.shared_rates import LedgerAway
from inference.server.listener import HOST_SETTING, CannotBind, why_unbound
from inference.server.rotation import ServerTls
from inference.server.tls import TlsError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from pathlib import Path

    from config.options import Options
    from inference.server.tls import TlsFiles

SOON = datetime.timedelta(days=30)


def check_ports(addresses: Mapping[tuple[str, int], str]) -> list[Finding]:
    """Whether each address can be bound, given with its setting. They are bound and released one after the other."""
    findings, free, unknown = [], [], set()
    for (host, port), setting in addresses.items():
        reason = why_unbound(host, port)
        if reason is None:
            free.append(str(port))
        elif isinstance(reason, socket.gaierror):
            unknown.add((host, reason.strerror))
        elif (owner := owner_of(port)) is not None:
            findings.append(warning("ports", f"a server of this user serves port {port} already (process {owner})"))
        else:
            findings.append(error("ports", str(CannotBind(host, port, setting, reason))))
    for host, text in sorted(unknown):
        findings.append(error("ports", f"{HOST_SETTING}: {host} cannot be resolved: {text}"))
    return [*findings, ok("ports", f"free: {', '.join(free)}")] if free else findings


def owner_of(port: int) -> int | None:
    """The process of this user that runs a command of ours and listens on the port; None: no such one is known."""
    with suppress(psutil.Error):
        for connection in psutil.net_connections("tcp"):
            if connection.status == psutil.CONN_LISTEN and connection.laddr.port == port and connection.pid:
                process = psutil.Process(connection.pid)
                words = process.cmdline()
                if process.uids().real == os.getuid() and {"serve", "web"} & set(words):
                    return process.pid
    return None


def check_certificates(files: Iterable[TlsFiles]) -> list[Finding]:
    """Whether TLS files can be used, now and in a month."""
    findings = []
    for each in files:
        try:
            ServerTls(each)
        except TlsError as problem:
            findings.append(error("certificates", str(problem)))
            continue
        for path in (each.certificate, *each.authorities):
            findings.append(check_dates(path))
    return findings or [ok("certificates", "none are used")]


def check_dates(path: Path) -> Finding:
    """Whether the certificates of a PEM file are valid, by the one that ends first."""
    now = datetime.datetime.now(datetime.UTC)
    chain = x509.load_pem_x509_certificates(path.read_bytes())
    ends = min(certificate.not_valid_after_utc for certificate in chain)
    if ends <= now:
        return error("certificates", f"{path} expired on {ends:%Y-%m-%d}", "renew it")
    if any(certificate.not_valid_before_utc > now for certificate in chain):
        return error("certificates", f"{path} is not valid yet", "check the machine's clock")
    if ends - now < SOON:
        return warning("certificates", f"{path} expires on {ends:%Y-%m-%d}", "renew it")
    return ok("certificates", f"{path} is valid until {ends:%Y-%m-%d}")


def check_redis(options: Options) -> list[Finding]:
    """Whether web processes can count rates together, if they are asked to."""
    url = options.redis_url.get_secret_value()
    if not url:
        return [ok("redis", "off: each web process counts rates for itself")]
    try:
        asyncio.run(_ping(url))
    except RedisMissing as problem:
        return [error("redis", str(problem))]
    except LedgerAway as problem:
        hint = "requests go on without it; each web process counts rates for itself"
        return [warning("redis", f"DRAGOMAN_REDIS_URL: it cannot be used: {problem}", hint)]
    return [ok("redis", "web processes count rates together")]


async def _ping(url: str) -> None:
    ledger = ledger_of(url, "doctor")
    try:
        await ledger.ping()
    finally:
        await ledger.close()
