"""TLS files: read as a whole, checked, and made into contexts. It keeps nothing that changes; `rotation.py` does."""

from __future__ import annotations

import datetime
import os
import stat
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import rsa
from OpenSSL import SSL, crypto

if TYPE_CHECKING:
    from pathlib import Path

MIN_RSA_BITS = 3072
MAX_PASSWORD_BYTES = 1024
MAX_FILE_BYTES = 16 << 20
OTHERS = 0o077
"""Rights of a key's file that nobody but its owner may have."""
CIPHERS = b"ECDHE+AESGCM:ECDHE+CHACHA20:@SECLEVEL=2"
"""Of TLS 1.2: forward secrecy and authenticated encryption alone, as all of TLS 1.3 has."""


class TlsError(Exception):
    """A certificate, key or revocation list cannot be used; the text names the file."""


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """PEM files: the server's certificate chain and key, the authorities of client certificates, and revocation
    lists. `password` is a text file with the password of an encrypted key. With `authorities` every client needs a
    certificate. `tls_1_2`: whether clients may speak TLS 1.2.
    """

    certificate: Path
    key: Path
    authorities: tuple[Path, ...] = ()
    revoked: tuple[Path, ...] = ()
    password: Path | None = None
    tls_1_2: bool = False

    @property
    def paths(self) -> tuple[Path, ...]:
        """All files."""
        return (
            self.certificate,
            self.key,
            *self.authorities,
            *self.revoked,
            *([self.password] if self.password else []),
        )


@dataclass(frozen=True, slots=True)
class Revoked:
    """One revocation list that an authority has signed."""

    issuer: x509.Name
    begin: datetime.datetime
    end: datetime.datetime | None
    serials: frozenset[int]


@dataclass(frozen=True, slots=True)
class TlsContent:
    """What the files hold. `key` is not encrypted. `revoked` are those of the `lists` that an authority has signed."""

    chain: tuple[x509.Certificate, ...]
    key: Any
    authorities: tuple[x509.Certificate, ...]
    lists: tuple[x509.CertificateRevocationList, ...]
    revoked: tuple[Revoked, ...]

    @property
    def chain_pem(self) -> bytes:
        """The server's certificate, and those between it and its authority."""
        return _pem(self.chain)

    @property
    def authorities_pem(self) -> bytes | None:
        """The authorities of client certificates; None: clients need none."""
        return _pem(self.authorities) or None

    @property
    def key_pem(self) -> bytes:
        """The key in the clear."""
        pem: bytes = self.key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )
        return pem

    def revokes(self, certificate: x509.Certificate) -> bool:
        """Whether the lists take a client's certificate away, as OpenSSL judges: its issuer must have a list, signed by an
        authority and in its time, that does not name it. Without lists nothing is revoked.
        """
        if not self.lists:
            return False
        now = datetime.datetime.now(datetime.UTC)
        own = [each for each in self.revoked if each.issuer == certificate.issuer]
        current = any(_in_time(each.begin, each.end, now) for each in own)
        return not current or any(certificate.serial_number in each.serials for each in own)


def read(files: TlsFiles) -> TlsContent:
    """Read and check all files. It may take some 100 ms where a password guards the key. Raises TlsError."""
    key = _private_key(files.key, files.password)
    chain = tuple(_certificates(files.certificate))
    try:
        fits = chain[0].public_key() == key.public_key()
    except (ValueError, UnsupportedAlgorithm) as error:
        raise TlsError(f"{files.certificate}: no readable certificate") from error
    if not fits:
        raise TlsError(f"{files.key} is not the key of {files.certificate}")
    if not _in_time(chain[0].not_valid_before_utc, chain[0].not_valid_after_utc, datetime.datetime.now(datetime.UTC)):
        raise TlsError(
            f"{files.certificate}: the certificate is valid from {chain[0].not_valid_before_utc:%Y-%m-%d %H:%M} to "
            f"{chain[0].not_valid_after_utc:%Y-%m-%d %H:%M} UTC, which is not now"
        )
    authorities = tuple(certificate for path in files.authorities for certificate in _certificates(path))
    lists = tuple(_revocation_list(path) for path in files.revoked)
    revoked = tuple(
        Revoked(each.issuer, each.last_update_utc, each.next_update_utc, frozenset(r.serial_number for r in each))
        for each in lists
        if _is_signed(each, authorities)
    )
    return TlsContent(chain, key, authorities, lists, revoked)


def context_of(content: TlsContent, files: TlsFiles) -> SSL.Context:
    """A context for connections; it asks clients for certificates where there are authorities. Raises TlsError."""
    try:
        return _context(content, SSL.TLS1_2_VERSION if files.tls_1_2 else SSL.TLS1_3_VERSION)
    except SSL.Error as error:  # such as a signature that is too weak
        raise TlsError(f"{files.certificate}: OpenSSL does not use it: {error}") from error


def _context(content: TlsContent, oldest: int) -> SSL.Context:
    context = SSL.Context(SSL.TLS_SERVER_METHOD)
    context.set_min_proto_version(oldest)
    context.set_cipher_list(CIPHERS)
    # A resumed session would keep a client in whose certificate is revoked meanwhile.
    context.set_session_cache_mode(SSL.SESS_CACHE_OFF)
    context.set_options(SSL.OP_NO_TICKET | SSL.OP_NO_RENEGOTIATION | SSL.OP_NO_COMPRESSION)
    context.use_certificate(content.chain[0])
    for certificate in content.chain[1:]:
        context.add_extra_chain_cert(certificate)
    context.use_privatekey(content.key)
    if content.authorities:
        store = context.get_cert_store()
        assert store is not None
        for certificate in content.authorities:
            store.add_cert(crypto.X509.from_cryptography(certificate))
        for each in content.lists:
            store.add_crl(each)
        if content.lists:
            store.set_flags(crypto.X509StoreFlags.CRL_CHECK)
        context.set_verify(SSL.VERIFY_PEER | SSL.VERIFY_FAIL_IF_NO_PEER_CERT, _verdict)
    return context


def _verdict(connection: Any, certificate: Any, error: int, depth: int, ok: int) -> bool:
    return bool(ok)


def _is_signed(revoked: x509.CertificateRevocationList, authorities: tuple[x509.Certificate, ...]) -> bool:
    issuers = [each.public_key() for each in authorities if each.subject == revoked.issuer]
    return any(revoked.is_signature_valid(key) for key in issuers)  # type: ignore[arg-type]


def _in_time(begin: datetime.datetime, end: datetime.datetime | None, now: datetime.datetime) -> bool:
    return begin <= now and (end is None or now <= end)


def _pem(certificates: tuple[x509.Certificate, ...]) -> bytes:
    return b"".join(each.public_bytes(serialization.Encoding.PEM) for each in certificates)


def _private_key(path: Path, password: Path | None) -> Any:
    pem = _secret(path, "private key", MAX_FILE_BYTES)
    try:
        key = serialization.load_pem_private_key(pem, None)
    except TypeError:
        key = _decrypted(path, pem, password)
    except (ValueError, UnsupportedAlgorithm) as error:
        raise TlsError(f"{path}: no readable private key") from error
    if isinstance(key, rsa.RSAPrivateKey) and key.key_size < MIN_RSA_BITS:
        raise TlsError(f"{path}: an RSA key must have at least {MIN_RSA_BITS} bits, this one has {key.key_size}")
    return key


def _decrypted(path: Path, pem: bytes, password: Path | None) -> Any:
    if password is None:
        raise TlsError(f"{path}: the key is encrypted, and no file with its password is named")
    try:
        secret = _secret(password, "password", MAX_PASSWORD_BYTES + 2).rstrip(b"\r\n")
    except TlsError as error:
        raise TlsError(f"{path}: the key is encrypted; {error}") from error
    if not 0 < len(secret) <= MAX_PASSWORD_BYTES:
        raise TlsError(f"{password}: a password has 1 to {MAX_PASSWORD_BYTES} bytes")
    try:
        return serialization.load_pem_private_key(pem, secret)
    except (ValueError, UnsupportedAlgorithm) as error:
        raise TlsError(f"{path}: no private key that the password in {password} decrypts") from error


def _secret(path: Path, what: str, limit: int) -> bytes:
    """The first `limit` bytes of a file that only its owner may read or write: this process's user, or root."""
    try:
        with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
            found = os.fstat(file.fileno())
            if not stat.S_ISREG(found.st_mode):
                raise TlsError(f"{path}: no readable {what}: it is no file")
            if found.st_mode & OTHERS:
                raise TlsError(
                    f"{path}: its mode is {stat.S_IMODE(found.st_mode):04o}, which opens the {what} to other users; it must "
                    "be 0600 or 0400"
                )
            if found.st_uid not in (os.geteuid(), 0):
                raise TlsError(f"{path}: the {what} belongs to another user, who may read and change it")
            return file.read(limit)
    except OSError as error:
        raise TlsError(f"{path}: no readable {what}: {error.strerror}") from error


def _certificates(path: Path) -> list[x509.Certificate]:
    try:
        return x509.load_pem_x509_certificates(path.read_bytes())
    except (OSError, ValueError) as error:
        raise TlsError(f"{path}: no readable certificate: {_reason(error, 'a certificate')}") from error


def _revocation_list(path: Path) -> x509.CertificateRevocationList:
    try:
        return x509.load_pem_x509_crl(path.read_bytes())
    except (OSError, ValueError) as error:
        raise TlsError(f"{path}: no readable revocation list: {_reason(error, 'a revocation list')}") from error


def _reason(error: OSError | ValueError, what: str) -> str:
    return error.strerror or str(error) if isinstance(error, OSError) else f"it is not {what} as PEM"
