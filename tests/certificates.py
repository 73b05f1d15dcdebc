"""Authorities and certificates for tests, made on the spot: good, expired, revoked, of strangers."""

from __future__ import annotations

import contextlib
import datetime
import ipaddress
import os
import ssl
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID
from OpenSSL import SSL

from engine.network.credentials import Credentials

HOUR = datetime.timedelta(hours=1)
LOCAL = (x509.DNSName("localhost"), x509.IPAddress(ipaddress.ip_address("127.0.0.1")))
PURPOSES = (ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH)


def now() -> datetime.datetime:
    return datetime.datetime.now(datetime.UTC)


def new_key() -> Any:
    return ec.generate_private_key(ec.SECP256R1())


@dataclass
class Issued:
    """A certificate with its key, and what lies between it and its authority."""

    key: Any
    chain: list[x509.Certificate]

    @property
    def pem(self) -> bytes:
        return b"".join(each.public_bytes(serialization.Encoding.PEM) for each in self.chain)

    def key_pem(self, password: bytes | None = None) -> bytes:
        lock = serialization.NoEncryption() if password is None else serialization.BestAvailableEncryption(password)
        pem: bytes = self.key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, lock)
        return pem

    @property
    def serial(self) -> int:
        return self.chain[0].serial_number

    def write(self, folder: Path, name: str, password: bytes | None = None) -> tuple[Path, Path]:
        """The files of the certificate and the key; each replaces the earlier one at once, as tools do."""
        return replace(folder / f"{name}.pem", self.pem), replace(folder / f"{name}.key", self.key_pem(password))


def replace(path: Path, content: bytes) -> Path:
    """A file that only its owner may read, in the place of another."""
    new = path.with_name(f"{path.name}.new")
    new.touch(mode=0o600)
    new.write_bytes(content)
    os.replace(new, path)
    return path


@dataclass
class Authority:
    name: str = "authority"
    issuer: Authority | None = None
    key: Any = field(default_factory=new_key)
    certificate: x509.Certificate = field(init=False)

    def __post_init__(self) -> None:
        signer = self.issuer or self
        subject = _name(self.name)
        self.certificate = (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(_name(signer.name))
            .public_key(self.key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now() - 48 * HOUR)
            .not_valid_after(now() + 48 * HOUR)
            .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(self.key.public_key()), critical=False)
            .add_extension(_usage(authority=True), critical=True)
            .sign(signer.key, hashes.SHA256())
        )

    @property
    def pem(self) -> bytes:
        return self.certificate.public_bytes(serialization.Encoding.PEM)

    def issue(self, name: str = "somebody", begin: float = -1, end: float = 24, key: Any = None) -> Issued:
        """A certificate for a client or for a server on this machine; `begin` and `end` are hours from now."""
        key = key or new_key()
        certificate = (
            x509.CertificateBuilder()
            .subject_name(_name(name))
            .issuer_name(self.certificate.subject)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now() + begin * HOUR)
            .not_valid_after(now() + end * HOUR)
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(x509.SubjectAlternativeName(LOCAL), critical=False)
            .add_extension(x509.ExtendedKeyUsage(PURPOSES), critical=False)
            .add_extension(_usage(authority=False), critical=True)
            .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(self.key.public_key()), critical=False)
            .sign(self.key, hashes.SHA256())
        )
        return Issued(key, [certificate, *([self.certificate] if self.issuer else [])])

    def revoke(self, *serials: int, begin: float = -1, end: float = 24) -> bytes:
        """A revocation list in PEM."""
        builder = (
            x509.CertificateRevocationListBuilder()
            .issuer_name(self.certificate.subject)
            .last_update(now() + begin * HOUR)
            .next_update(now() + end * HOUR)
        )
        for serial in serials:
            entry = x509.RevokedCertificateBuilder().serial_number(serial).revocation_date(now() - HOUR).build()
            builder = builder.add_revoked_certificate(entry)
        return builder.sign(self.key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)


def self_signed(name: str = "nobody") -> Issued:
    """A certificate that vouches for itself alone."""
    alone = Authority(name)
    return Issued(alone.key, [alone.certificate])


def credentials(folder: Path, trusted: Authority, shown: Issued) -> Credentials:
    """What a process of a cluster has: files of the authority that it trusts and of the certificate that it shows."""
    certificate, key = shown.write(folder, f"host-{shown.serial}")
    authority = replace(folder / f"{certificate.stem}-trusts.pem", trusted.pem)
    return Credentials(authority=str(authority), certificate=str(certificate), key=str(key))


def client_context(trusted: Authority, folder: Path, shown: Issued | None = None) -> ssl.SSLContext:
    """A client that trusts one authority, and shows a certificate if it has one."""
    context = ssl.create_default_context(cadata=trusted.pem.decode())
    if shown is not None:
        context.load_cert_chain(*shown.write(folder, f"client-{shown.serial}"))
    return context


def handshake(server: Any, client: ssl.SSLContext) -> str | None:
    """A handshake in memory with what gives contexts; the version that both sides speak."""
    served = SSL.Connection(server.getContext(), None)
    served.set_accept_state()
    received, sent = ssl.MemoryBIO(), ssl.MemoryBIO()
    connection = client.wrap_bio(received, sent, server_hostname="localhost")
    for _ in range(8):
        with contextlib.suppress(ssl.SSLWantReadError):
            connection.do_handshake()
        if data := sent.read():
            served.bio_write(data)
        with contextlib.suppress(SSL.WantReadError):
            served.do_handshake()
        try:
            received.write(served.bio_read(1 << 16))
        except SSL.WantReadError:
            return connection.version()
    return None


def _name(text: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])


def _usage(*, authority: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=True, content_commitment=False, key_encipherment=False, data_encipherment=False,
        key_agreement=False, key_cert_sign=authority, crl_sign=authority, encipher_only=False, decipher_only=False,
    )  # fmt: skip
