"""The certificate by which a process of the cluster is known to the others, and contexts for TLS of it.

Both sides of every connection show a certificate of the cluster's authority, and trust no other authority. TLS is 1.3 alone,
for both sides are of this project. No session is resumed: a certificate is looked at in every connection.
"""

from __future__ import annotations

import logging
import os
import ssl
import stat

import msgspec

from engine.network.stream import SecureSocket

logger = logging.getLogger(__name__)

OTHERS = 0o077
"""Rights of a secret's file that nobody but its owner may have."""
MAX_PASSWORD_BYTES = 1024

Version = tuple[tuple[int, int, int], ...]


class CredentialsError(ValueError):
    """The files cannot be used; the text names the file."""


class Credentials(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Paths of PEM files on this host: the cluster's authority, a certificate of it, its key; of a text file with the
    password if the key is encrypted; and of the authority's revocation list, if there is one: its certificates are then refused when
    the list names them, or is out of date.
    """

    authority: str
    certificate: str
    key: str
    password: str = ""
    revoked: str = ""

    def check(self) -> None:
        """Raise CredentialsError unless both kinds of context can be made."""
        self.client_context("")
        self.server_context([])

    def client_context(self, protocol: str) -> ssl.SSLContext:
        """For connections to workers; a worker's certificate must have the name of its address. `protocol`: what the connection
        is for (ALPN). Reads files; raises CredentialsError.
        """
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.hostname_checks_common_name = False
        return self._filled(context, [protocol] if protocol else [])

    def server_context(self, protocols: list[str]) -> ssl.SSLContext:
        """For connections from clients, which must show a certificate. `protocols`: what a connection may be for. Reads files;
        raises CredentialsError.
        """
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.verify_mode = ssl.CERT_REQUIRED
        context.num_tickets = 0
        context.sslsocket_class = SecureSocket
        return self._filled(context, protocols)

    def version(self) -> Version:
        """Changes when one of the files is replaced. Raises OSError."""
        paths = (self.authority, self.certificate, self.key, *([self.revoked] if self.revoked else []))
        found = [os.stat(path) for path in paths]
        return tuple((each.st_ino, each.st_mtime_ns, each.st_size) for each in found)

    def _filled(self, context: ssl.SSLContext, protocols: list[str]) -> ssl.SSLContext:
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.options |= ssl.OP_NO_TICKET
        if protocols:
            context.set_alpn_protocols(protocols)
        _only_its_owner_reads(self.key)
        password = self._password()
        try:
            context.load_verify_locations(self.authority)
        except OSError as error:
            raise CredentialsError(f"{self.authority}: no readable authority: {_cause(error)}") from error
        try:
            # Without a function OpenSSL would ask for the password at the terminal.
            context.load_cert_chain(self.certificate, self.key, lambda: password)
        except OSError as error:
            why = "" if password else ", or the key is encrypted and no file with its password is named"
            raise CredentialsError(f"{self.certificate} and {self.key} are no certificate and its key{why}") from error
        if self.revoked:
            self._refuse_revoked(context)
        return context

    def _refuse_revoked(self, context: ssl.SSLContext) -> None:
        trusted = context.cert_store_stats()
        try:
            context.load_verify_locations(self.revoked)
        except OSError as error:
            raise CredentialsError(f"{self.revoked}: no readable revocation list: {_cause(error)}") from error
        found = context.cert_store_stats()
        if found["x509"] != trusted["x509"] or found["crl"] == trusted["crl"]:  # it would be trusted like an authority
            raise CredentialsError(f"{self.revoked}: a revocation list is expected, and no certificate")
        context.verify_flags |= ssl.VERIFY_CRL_CHECK_LEAF

    def _password(self) -> bytes:
        if not self.password:
            return b""
        _only_its_owner_reads(self.password)
        try:
            with open(self.password, "rb") as file:
                found = file.read(MAX_PASSWORD_BYTES + 2).rstrip(b"\r\n")
        except OSError as error:
            raise CredentialsError(f"{self.password}: no readable password: {_cause(error)}") from error
        if not 0 < len(found) <= MAX_PASSWORD_BYTES:
            raise CredentialsError(f"{self.password}: a password has 1 to {MAX_PASSWORD_BYTES} bytes")
        return found


class ServerContext:
    """A server's context, made again when its files have been replaced; connections of before go on with what they had."""

    def __init__(self, credentials: Credentials, protocols: list[str]) -> None:
        """Raises CredentialsError."""
        self._credentials, self._protocols = credentials, protocols
        self._context = credentials.server_context(protocols)
        self._version = self._seen()

    def current(self) -> ssl.SSLContext:
        """The context for a new connection. Files that cannot be used are logged, and the earlier ones stay in use."""
        version = self._seen()
        if version is not None and version != self._version:
            self._version = version
            try:
                self._context = self._credentials.server_context(self._protocols)
            except CredentialsError as error:
                logger.error("the cluster's certificate was replaced by one that cannot be used: %s", error)
        return self._context

    def _seen(self) -> Version | None:
        try:
            return self._credentials.version()
        except OSError:  # it is being replaced
            return None


def _only_its_owner_reads(path: str) -> None:
    try:
        found = os.stat(path)
    except OSError as error:
        raise CredentialsError(f"{path}: not readable: {_cause(error)}") from error
    if not stat.S_ISREG(found.st_mode):
        raise CredentialsError(f"{path}: it is no file")
    if found.st_mode & OTHERS:
        mode = stat.S_IMODE(found.st_mode)
        raise CredentialsError(
            f"{path}: its mode is {mode:04o}, which opens it to other users; it must be 0600 or 0400"
        )
    if found.st_uid not in (os.geteuid(), 0):
        raise CredentialsError(f"{path}: it belongs to another user, who may read and change it")


def _cause(error: OSError) -> str:
    return error.strerror or type(error).__name__
