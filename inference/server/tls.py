"""Mutual TLS for a listener: clients authenticate with certificates. Files are read once at startup."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import rsa
from OpenSSL import SSL, crypto
from twisted.internet import ssl

MIN_RSA_BITS = 3072
MAX_PASSWORD_BYTES = 1024


class TlsError(Exception):
    """A certificate, key or revocation list cannot be used; the text names the file."""


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """PEM files: the server's certificate chain and key, the authorities of client certificates, and revocation
    lists. `password` is a text file with the password of an encrypted key.
    """

    certificate: Path
    key: Path
    authorities: tuple[Path, ...]
    revoked: tuple[Path, ...] = ()
    password: Path | None = None


class MutualContextFactory(ssl.ContextFactory):
    """TLS 1.3 contexts that require a client certificate."""

    def __init__(self, files: TlsFiles) -> None:
        """Reads and checks the files; raises TlsError."""
        context = SSL.Context(SSL.TLS_SERVER_METHOD)
        context.set_min_proto_version(SSL.TLS1_3_VERSION)
        key = _private_key(files.key, files.password)
        try:
            context.use_certificate_chain_file(str(files.certificate))
        except SSL.Error as error:
            raise TlsError(f"{files.certificate}: no readable certificate") from error
        try:
            context.use_privatekey(key)
            context.check_privatekey()
        except SSL.Error as error:
            raise TlsError(f"{files.key} is not the key of {files.certificate}") from error
        store = context.get_cert_store()
        if store is None or not files.authorities:
            raise TlsError("at least one file of authorities is needed")
        for path in files.authorities:
            for certificate in _certificates(path):
                store.add_cert(certificate)
        for path in files.revoked:
            store.add_crl(_revocation_list(path))
        if files.revoked:
            store.set_flags(crypto.X509StoreFlags.CRL_CHECK)
        context.set_verify(SSL.VERIFY_PEER | SSL.VERIFY_FAIL_IF_NO_PEER_CERT, _verdict)
        context.set_session_cache_mode(SSL.SESS_CACHE_OFF)
        self._context = context

    def getContext(self) -> Any:
        """Called by Twisted for every connection."""
        return self._context


def _verdict(connection: Any, certificate: Any, error: int, depth: int, ok: int) -> bool:
    return bool(ok)


def _private_key(path: Path, password: Path | None) -> Any:
    try:
        pem = path.read_bytes()
        key = serialization.load_pem_private_key(pem, None)
    except TypeError:
        key = _decrypted(path, pem, password)
    except (OSError, ValueError, UnsupportedAlgorithm) as error:
        raise TlsError(f"{path}: no readable private key") from error
    if isinstance(key, rsa.RSAPrivateKey) and key.key_size < MIN_RSA_BITS:
        raise TlsError(f"{path}: an RSA key must have at least {MIN_RSA_BITS} bits, this one has {key.key_size}")
    return key


def _decrypted(path: Path, pem: bytes, password: Path | None) -> Any:
    secret = _password(path, password)
    try:
        return serialization.load_pem_private_key(pem, secret)
    except (ValueError, UnsupportedAlgorithm) as error:
        raise TlsError(f"{path}: no private key that the password in {password} decrypts") from error


def _password(key: Path, path: Path | None) -> bytes:
    """The password of an encrypted key: the file's content without the end of its line."""
    if path is None:
        raise TlsError(f"{key}: the key is encrypted, and no file with its password is named")
    try:
        with path.open("rb") as file:
            password = file.read(MAX_PASSWORD_BYTES + 1).rstrip(b"\r\n")
    except OSError as error:
        raise TlsError(f"{key}: the key is encrypted, and the file with its password cannot be read: {path}") from error
    if not 0 < len(password) <= MAX_PASSWORD_BYTES:
        raise TlsError(f"{path}: a password has 1 to {MAX_PASSWORD_BYTES} bytes")
    return password


def _certificates(path: Path) -> list[crypto.X509]:
    marker = b"-----BEGIN CERTIFICATE-----"
    try:
        parts = path.read_bytes().split(marker)[1:]
        found = [crypto.load_certificate(crypto.FILETYPE_PEM, marker + part) for part in parts]
    except (OSError, crypto.Error) as error:
        raise TlsError(f"{path}: no readable certificates") from error
    if not found:
        raise TlsError(f"{path}: it holds no certificate")
    return found


def _revocation_list(path: Path) -> Any:

    try:
        return x509.load_pem_x509_crl(path.read_bytes())
    except (OSError, ValueError) as error:
        raise TlsError(f"{path}: no readable revocation list") from error
