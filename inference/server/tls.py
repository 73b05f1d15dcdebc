"""Mutual TLS for a listener: clients authenticate with certificates. Files are read once at startup."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cryptography import x509
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import rsa
from OpenSSL import SSL, crypto
from twisted.internet import ssl

MIN_RSA_BITS = 3072


class TlsError(Exception):
    """A certificate, key or revocation list cannot be used; the text names the file."""


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """PEM files: the server's certificate chain and key, the authorities of client certificates, and revocation
    lists.
    """

    certificate: Path
    key: Path
    authorities: tuple[Path, ...]
    revoked: tuple[Path, ...] = ()


class MutualContextFactory(ssl.ContextFactory):
    """TLS contexts that require a client certificate."""

    def __init__(self, files: TlsFiles) -> None:
        """Reads and checks the files; raises TlsError."""
        context = SSL.Context(SSL.TLS_SERVER_METHOD)
        context.set_min_proto_version(SSL.TLS1_2_VERSION)
        key = _private_key(files.key)
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


def _private_key(path: Path) -> Any:
    try:
        key = serialization.load_pem_private_key(path.read_bytes(), None)
    except TypeError as error:
        raise TlsError(f"{path}: the key is behind a password; such keys are not read") from error
    except (OSError, ValueError) as error:
        raise TlsError(f"{path}: no readable private key") from error
    if isinstance(key, rsa.RSAPrivateKey) and key.key_size < MIN_RSA_BITS:
        raise TlsError(f"{path}: an RSA key must have at least {MIN_RSA_BITS} bits, this one has {key.key_size}")
    return key


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
