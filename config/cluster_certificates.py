"""`cluster-certificates`: makes an authority and the certificates of a cluster's hosts and clients, for tests and small clusters.

An authority that is in the folder already signs further hosts' certificates. It also writes the authority's list of revoked certificates, the only
file that it ever changes. It prints no key.
"""

from __future__ import annotations

import argparse
import datetime
import ipaddress
import os
import re
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

AUTHORITY = "authority"
CLIENT = "client"
REVOKED = "revocations.pem"
AUTHORITY_DAYS = 3650
DAYS = 825
CLOCKS_DIFFER = datetime.timedelta(hours=1)
"""Certificates begin so long ago: the clocks of hosts differ."""
SERVER_AND_CLIENT = (ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH)


def main(program: str, arguments: list[str]) -> int:
    """`cluster-certificates DIRECTORY --hosts HOST... --revoke HOST...`: the exit status is 0, or 1 if a file cannot be made."""
    parser = argparse.ArgumentParser(prog=f"{program} cluster-certificates", description=__doc__)
    parser.add_argument("directory", type=Path, help="The folder of the files; made if it is not there.")
    parser.add_argument(
        "--hosts", nargs="+", default=[], metavar="HOST",
        help="Names or IP addresses by which hosts with workers are reached (WORKER_HOST); each gets HOST.pem and HOST.key.",
    )  # fmt: skip
    parser.add_argument(
        "--revoke", nargs="+", default=[], metavar="HOST",
        help=f"Hosts whose certificates in the folder, or `{CLIENT}`, go into the list of revoked ones, {REVOKED} (CLUSTER_REVOCATIONS).",
    )  # fmt: skip
    parser.add_argument("--days", type=int, default=DAYS, help=f"Days that the hosts' certificates last; {DAYS}.")
    options = parser.parse_args(arguments)
    for host in options.hosts:
        if not re.fullmatch(r"[A-Za-z0-9._:-]+", host) or host in (AUTHORITY, CLIENT):
            parser.error(f"{host}: is no name of a host")
    for host in options.revoke:
        if not re.fullmatch(r"[A-Za-z0-9._:-]+", host) or host == AUTHORITY:
            parser.error(f"{host}: is no name of a host")
    if not options.hosts and not options.revoke:
        parser.error("--hosts or --revoke is needed")
    if not 1 <= options.days <= AUTHORITY_DAYS:
        parser.error(f"--days: must be from 1 to {AUTHORITY_DAYS}")
    try:
        if options.revoke:
            print(f"{revoke(options.directory, options.revoke)} is written")
        for path in make(options.directory, list(dict.fromkeys(options.hosts)), options.days) if options.hosts else ():
            print(f"{path} is made")
    except FileExistsError as error:
        print(f"error: {error.filename} is there, and is not replaced", file=sys.stderr)
        return 1
    except (OSError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


def make(directory: Path, hosts: list[str], days: int = DAYS) -> list[Path]:
    """Write the files; returns their paths. Raises OSError or ValueError, before anything is written if a file is there."""
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    authority, wanted = directory / f"{AUTHORITY}.pem", list(hosts)
    known = authority.exists()
    if not known or not (directory / f"{CLIENT}.pem").exists():
        wanted.append(CLIENT)
    for name in wanted if known else [AUTHORITY, *wanted]:
        for path in _files(directory, name):
            if path.exists():
                raise FileExistsError(17, "is there", str(path))
    certificate, key = _read(directory) if known else _authority(directory)
    if not (directory / REVOKED).exists():
        revoke(directory, [])
    for name in wanted:
        _issue(directory, name, certificate, key, days)
    return [path for name in (wanted if known else [AUTHORITY, *wanted]) for path in _files(directory, name)]


def revoke(directory: Path, hosts: list[str]) -> Path:
    """Add the certificates of these hosts to the list of revoked ones, which lasts as long as the authority; returns its path. Raises OSError or
    ValueError, before anything is written.
    """
    authority, signer = _read(directory)
    path = directory / REVOKED
    builder = (
        x509.CertificateRevocationListBuilder()
        .issuer_name(authority.subject)
        .last_update(datetime.datetime.now(datetime.UTC) - CLOCKS_DIFFER)
        .next_update(authority.not_valid_after_utc)
    )
    entries = {each.serial_number: each for each in x509.load_pem_x509_crl(path.read_bytes())} if path.exists() else {}
    for host in hosts:
        serial = x509.load_pem_x509_certificate(_files(directory, host)[0].read_bytes()).serial_number
        now = datetime.datetime.now(datetime.UTC)
        entries[serial] = x509.RevokedCertificateBuilder().serial_number(serial).revocation_date(now).build()
    for entry in entries.values():
        builder = builder.add_revoked_certificate(entry)
    content = builder.sign(signer, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)
    fresh = path.with_suffix(".new")
    fresh.write_bytes(content)
    fresh.chmod(0o644)
    fresh.replace(path)  # at once: processes read it
    return path


def _files(directory: Path, name: str) -> tuple[Path, Path]:
    return directory / f"{name}.pem", directory / f"{name}.key"


def _read(directory: Path) -> tuple[x509.Certificate, Any]:
    certificate, key = _files(directory, AUTHORITY)
    try:
        found = x509.load_pem_x509_certificate(certificate.read_bytes())
        return found, serialization.load_pem_private_key(key.read_bytes(), None)
    except (ValueError, TypeError, UnsupportedAlgorithm) as error:
        raise ValueError(f"{certificate} and {key}: no readable authority and its key") from error


def _authority(directory: Path) -> tuple[x509.Certificate, Any]:
    key = ec.generate_private_key(ec.SECP256R1())
    # The name differs from any other cluster's, so that a certificate of that one is told by its issuer.
    subject = _name(f"Dragoman cluster {x509.random_serial_number() >> 96:x}")
    certificate = (
        _builder(subject, subject, key, AUTHORITY_DAYS)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_usage(authority=True), critical=True)
        .sign(key, hashes.SHA256())
    )
    _write(directory, AUTHORITY, certificate, key)
    return certificate, key


def _issue(directory: Path, name: str, authority: x509.Certificate, signer: Any, days: int) -> None:
    """A certificate for a host, which serves and calls, or for clients, which only call."""
    key = ec.generate_private_key(ec.SECP256R1())
    purposes = [ExtendedKeyUsageOID.CLIENT_AUTH] if name == CLIENT else SERVER_AND_CLIENT
    certificate = (
        _builder(_name(name[:64]), authority.subject, key, days)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(x509.SubjectAlternativeName([_alternative(name)]), critical=False)
        .add_extension(x509.ExtendedKeyUsage(purposes), critical=False)
        .add_extension(_usage(authority=False), critical=True)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(authority.public_key()), critical=False)  # type: ignore[arg-type]
        .sign(signer, hashes.SHA256())
    )
    _write(directory, name, certificate, key)


def _builder(subject: x509.Name, issuer: x509.Name, key: Any, days: int) -> x509.CertificateBuilder:
    now = datetime.datetime.now(datetime.UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - CLOCKS_DIFFER)
        .not_valid_after(now + datetime.timedelta(days=days))
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
    )


def _alternative(name: str) -> x509.GeneralName:
    with suppress(ValueError):
        return x509.IPAddress(ipaddress.ip_address(name))
    return x509.DNSName(name)


def _name(text: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])


def _usage(*, authority: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not authority, content_commitment=False, key_encipherment=False, data_encipherment=False,
        key_agreement=False, key_cert_sign=authority, crl_sign=authority, encipher_only=False, decipher_only=False,
    )  # fmt: skip


def _write(directory: Path, name: str, certificate: x509.Certificate, key: Any) -> None:
    """Both files, the key first and for its owner alone."""
    secret = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    shown, hidden = _files(directory, name)
    for path, content, mode in (
        (hidden, secret, 0o600),
        (shown, certificate.public_bytes(serialization.Encoding.PEM), 0o644),
    ):
        with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as file:
            file.write(content)
