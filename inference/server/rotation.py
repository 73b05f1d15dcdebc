"""TLS of listeners whose files may change while the server runs: new connections get the new files' content, running ones
go on with theirs.
"""

from __future__ import annotations

import asyncio
import os
from typing import TYPE_CHECKING, Any

import grpc
import structlog
from cryptography import x509
from twisted.internet import ssl

from inference.server.tls import TlsError, context_of, read

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping
    from pathlib import Path

    from inference.server.tls import TlsContent, TlsFiles

CHECK_EVERY_S = 1.0
logger = structlog.get_logger(__name__)


class ServerTls(ssl.ContextFactory):
    """The current content of TLS files, as Twisted and gRPC want it."""

    def __init__(self, files: TlsFiles) -> None:
        """Reads and checks the files; raises TlsError."""
        self.files = files
        self._seen = _states(files)
        self._adopt(read(files))

    @property
    def asks_clients(self) -> bool:
        """Whether a client needs a certificate."""
        return bool(self.files.authorities)

    def getContext(self) -> Any:
        """Called by Twisted for every connection."""
        return self._context

    def reload(self) -> None:
        """Read the files if one has changed; files that cannot be used are logged, and the earlier content stays.

        It blocks. One caller at a time.
        """
        seen = _states(self.files)
        if seen == self._seen:
            return
        self._seen = seen  # taken before reading: what is written meanwhile is read next time
        try:
            self._adopt(read(self.files))
        except TlsError as error:
            logger.error("changed TLS files cannot be used; the earlier ones stay in use", reason=str(error))
            return
        logger.info("TLS files reloaded", certificate=str(self.files.certificate))

    def _adopt(self, content: TlsContent) -> None:
        context = context_of(content, self.files)
        pair = (content.key_pem, content.chain_pem)
        self._context, self._content = context, content
        self._grpc = grpc.ssl_server_certificate_configuration([pair], content.authorities_pem)
        self._channel = None

    def grpc_credentials(self) -> grpc.ServerCredentials:
        """The credentials of one gRPC port."""
        return grpc.dynamic_ssl_server_credentials(self._grpc, self._changes(), self.asks_clients)

    def channel_credentials(self) -> grpc.ChannelCredentials:
        """The credentials of a client with the same files: its own certificate, and the authorities of servers. The same
        object as long as the files do not change.
        """
        if self._channel is None:
            content = self._content
            self._channel = grpc.ssl_channel_credentials(content.authorities_pem, content.key_pem, content.chain_pem)
        return self._channel

    def _changes(self) -> Callable[[], grpc.ServerCertificateConfiguration | None]:
        """A function that gRPC calls for every connection, in threads of its own: the configuration if it is a new one."""
        told = self._grpc

        def change() -> grpc.ServerCertificateConfiguration | None:
            nonlocal told
            current = self._grpc
            if current is told:
                return None
            told = current
            return current

        return change

    def guarded(self, handler: grpc.GenericRpcHandler) -> grpc.GenericRpcHandler:
        """The handler, closed to clients whose certificates are revoked: gRPC itself reads no revocation lists."""
        return _Unrevoked(handler, self) if self.files.revoked else handler

    def revokes(self, peer: Mapping[str, Iterable[bytes]]) -> bool:
        """Whether the certificate of a gRPC call's client is revoked."""
        return any(self._content.revokes(x509.load_pem_x509_certificate(pem)) for pem in peer.get("x509_pem_cert", ()))


class _Unrevoked(grpc.GenericRpcHandler):
    """A handler of streams whose calls end at once where the client's certificate is revoked."""

    def __init__(self, handler: grpc.GenericRpcHandler, tls: ServerTls) -> None:
        self._handler, self._tls = handler, tls

    def service(self, details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler | None:
        """Called once for each call, before its first message is read."""
        found: Any = self._handler.service(details)
        if found is None:
            return None

        async def run(requests: Any, context: Any) -> None:
            if self._tls.revokes(context.auth_context()):
                logger.warning("call with a revoked certificate refused", method=details.method)
                await context.abort(grpc.StatusCode.UNAUTHENTICATED, "the client's certificate is revoked")
            await found.stream_stream(requests, context)

        return grpc.stream_stream_rpc_method_handler(run)


async def keep_fresh(every: Iterable[ServerTls]) -> None:
    """Reload changed files, until it is cancelled."""
    used = list(every)
    while used:
        await asyncio.sleep(CHECK_EVERY_S)
        for tls in used:
            await asyncio.to_thread(tls.reload)


def _states(files: TlsFiles) -> list[tuple[int, ...] | None]:
    """What changes with a file's content, behind symbolic links; None for a file that is not there."""
    return [_state(path) for path in files.paths]


def _state(path: Path) -> tuple[int, ...] | None:
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns
