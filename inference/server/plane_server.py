"""A Daphne server with limits, back-pressure and graceful shutdown.

- Requests rejected by their headers (route, key, length, Host) are answered before the body is read.
- A body over `max_body_bytes` is answered with 413 and not read further.
- `send()` blocks while the client does not read, and aborts after `slow_client_timeout_s`.
- A response that fails midway closes the connection, so it never looks complete.
- SIGTERM stops listening, refuses new requests, waits `drain_s` for streams, then ends them. If other processes share the
  ports, requests on open connections are answered for `linger_s` first, each as the last of its connection.
- Requests without exactly one Host are refused; `Daphne-Root-Path` is ignored.
"""

from __future__ import annotations

import asyncio
import logging
from functools import partial
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote

from daphne import server as daphne_server  # first: installs the asyncio reactor
from daphne.http_protocol import HTTPFactory, WebRequest
from daphne.ws_protocol import WebSocketProtocol
from twisted.internet import defer, tcp
from twisted.internet.error import CannotListenError
from twisted.internet.interfaces import IPushProducer
from twisted.web import http
from zope.interface import implementer

from inference.server import underscores
from inference.server.channel import DeadlineChannel
from inference.server.connections import OpenConnections
from inference.server.listener import CannotBind
from inference.server.phrases import phrase

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from inference.server.listener import Listener

    Headers = list[tuple[bytes, bytes]]
    Answer = tuple[int, Headers, bytes, bytes]
    Refuse = Callable[[str, int, str, str, dict[bytes, bytes], int], tuple[Headers, bytes, bytes]]
    Preview = Callable[[str, int, str, str, dict[bytes, bytes]], Answer | None]

logger = logging.getLogger(__name__)

CONNECTIONS = OpenConnections()
"""Of this process."""
SMALL_BODY_BYTES = 1 << 16
"""The largest body that is read when no permit is free, to keep the connection alive."""
FREE_CHUNKS, BYTES_PER_CHUNK = 1024, 32
"""Chunks of a body that may be of any size, and the least mean size of all others: each costs the event loop some microseconds."""
LINGER_CHECK_S = 0.1
FINAL_EVENT_S = 2.0
"""Seconds for streams to send their final event after the drain's deadline."""


@implementer(IPushProducer)
class PlaneRequest(WebRequest):
    """One request, from its headers to the last byte of its response."""

    writable: asyncio.Event | None = None  # set while the client reads too slowly
    too_large = False
    chunks = 0
    max_body_bytes = 0
    reason = b""
    """The dialect's reason phrase."""

    def refusal(self, method: bytes, target: bytes, version: bytes, length: int | None) -> Answer | None:
        """The early response to a request's headers, or None to read the body (`length` None: chunked)."""
        address, path = self.getHost(), target.split(b"?", 1)[0].decode("latin-1")
        verb = method.decode("latin-1")
        self.max_body_bytes = self.server.max_body_bytes(address.host, address.port)
        status, headers = None, self._lower_headers()
        if self._has_wrong_host(version):
            status = 400
        else:
            known = self.server.preview(address.host, address.port, verb, unquote(path), headers)
            if known is None and (length is None or length > SMALL_BODY_BYTES):
                known = self.server.overloaded(address.host, address.port, verb, unquote(path), headers)
            if known is not None:
                return known
            if length is not None and length > self.max_body_bytes:
                status = 413
        if status is None:
            return None
        return status, *self.server.refuse(address.host, address.port, verb, path, headers, status)

    def gotLength(self, length: int | None) -> None:
        """Called when the headers are complete and accepted.

        The body is kept in memory, bounded by `max_body_bytes`: Twisted would write one of 100 kB or of unknown
        length to disk, on the event loop, and fail if the disk is full.
        """
        super().gotLength(0)

    def handleContentChunk(self, data: bytes) -> None:
        """Keep body bytes up to the limit."""
        if self.too_large:
            return
        self.chunks += 1
        if self.channel.length is None and self.chunks > FREE_CHUNKS + self.content.tell() // BYTES_PER_CHUNK:
            self.too_large = True
            self.channel.send_refusal(400, [], b"")
            return
        if self.content.tell() + len(data) <= self.max_body_bytes:
            super().handleContentChunk(data)
            return
        self.too_large = True
        channel, address = self.channel, self.getHost()
        path = channel._path.split(b"?", 1)[0].decode("latin-1")
        method = channel._command.decode("latin-1")
        headers = self._lower_headers()
        channel.send_refusal(413, *self.server.refuse(address.host, address.port, method, path, headers, 413))

    def process(self) -> None:
        """The request is complete: refuse it or start the application."""
        if self._has_wrong_host(self.clientproto):
            self._refuse(400)
        elif (answer := self._overloaded()) is not None:
            self._reply(*answer)
        else:
            self.requestHeaders.removeHeader(b"daphne-root-path")
            channel = self.channel
            super().process()
            if self.transport is None:  # it became a WebSocket
                channel.leave()

    def _overloaded(self) -> Answer | None:
        """The response when no permit is free. The application is not started, and the connection is kept."""
        address, path = self.getHost(), self.path.split(b"?", 1)[0].decode("latin-1")
        return self.server.overloaded(
            address.host, address.port, self.method.decode("latin-1"), unquote(path), self._lower_headers()
        )

    def _lower_headers(self) -> dict[bytes, bytes]:
        return {name.lower(): values[-1] for name, values in self.requestHeaders.getAllRawHeaders()}

    def _has_wrong_host(self, version: bytes) -> bool:
        hosts = self.requestHeaders.getRawHeaders(b"host") or []
        return len(hosts) > 1 or (not hosts and version != b"HTTP/1.0")

    def pauseProducing(self) -> None:
        """Twisted's write buffer is full."""
        self.writable = asyncio.Event()

    def resumeProducing(self) -> None:
        """The client reads again."""
        if self.writable:
            self.writable.set()
            self.writable = None

    stopProducing = resumeProducing

    def handle_reply(self, message: dict[str, Any]) -> None:
        """Write one ASGI message. That of the status line may have a `reason`, which ASGI does not know."""
        self.reason = message.get("reason", self.reason)
        if message["type"] == "http.response.start" and self.server.lingers and self.channel is not None:
            self.channel.persistent = False
            message = {**message, "headers": [*message.get("headers", []), (b"connection", b"close")]}
        if message["type"] == "http.response.body":
            if not message.get("more_body"):
                if self.producer is not None:
                    self.unregisterProducer()
            elif self.startedWriting:
                if self._write_now(message.get("body", b"")):
                    return
            else:
                super().handle_reply(message)
                if not self.finished and self.channel is not None:
                    self.registerProducer(self, True)
                return
        super().handle_reply(message)

    def handle_exception(self, exception: BaseException | None) -> None:
        """After the status line, an error can only close the connection."""
        if not self._response_started:
            self._reply(500, [(b"content-type", b"application/json")], b'{"error":"internal error"}')
        else:
            self.abort()

    def abort(self) -> None:
        """Abort the connection."""
        if self.channel is not None:
            if self.producer is not None:
                self.unregisterProducer()
            (getattr(self.channel, "transport", None) or self.channel).abortConnection()
        self.resumeProducing()

    def _refuse(self, status: int) -> None:
        path = self.path.split(b"?", 1)[0].decode("latin-1")
        address = self.getHost()
        method = self.method.decode("latin-1")
        answered, body, reason = self.server.refuse(
            address.host, address.port, method, path, self._lower_headers(), status
        )
        self.channel.persistent = False  # a proxy may have read another request than this one
        self._reply(status, [*answered, (b"connection", b"close")], body, reason)

    def setResponseCode(self, code: int, message: bytes | None = None) -> None:
        """Called by Daphne, which knows no phrases."""
        super().setResponseCode(code, message or phrase(code, self.reason))

    def _reply(self, status: int, headers: Headers, body: bytes, reason: bytes = b"") -> None:
        headers = [*headers, (b"content-length", b"%d" % len(body))]
        self.reason = reason
        super().handle_reply({"type": "http.response.start", "status": status, "headers": headers})
        super().handle_reply({"type": "http.response.body", "body": body})

    def _write_now(self, data: bytes) -> bool:
        """Write one chunk directly to the socket; False if it must be queued. Halves the cost of an event."""
        transport = getattr(self.channel, "transport", None)
        # Only for a plain TCP socket: a TLS wrapper forwards attributes and would leak plaintext.
        if not isinstance(transport, tcp.Server) or transport.TLS or not self.chunked or self.finished:
            return False
        if not data or not transport.connected or transport.dataBuffer or transport._tempDataBuffer:
            return not data
        frame = b"%x\r\n%b\r\n" % (len(data), data)
        try:
            sent = transport.socket.send(frame)
        except BlockingIOError:
            sent = 0
        except OSError:
            return False  # let twisted notice and report the loss
        self.sentLength += len(data)
        if sent < len(frame):
            transport.write(frame[sent:])
        return True


class PlaneFactory(HTTPFactory):
    """Creates connections with deadlines, and PlaneRequests on them."""

    @staticmethod
    def protocol() -> Any:
        """Called by Twisted for a new connection."""
        return http._GenericHTTPChannelProtocol(DeadlineChannel())

    def acceptableProtocols(self) -> list[bytes]:
        """Only HTTP/1.1 over TLS: Twisted's HTTP/2 has none of these deadlines and limits."""
        return [b"http/1.1"]

    def buildProtocol(self, addr: Any) -> Any:
        """A new connection, which is closed if its address has too many."""
        protocol = super().buildProtocol(addr)
        protocol._channel.admit = partial(CONNECTIONS.admit, protocol._channel, self.server.max_connections)
        # The application parses bodies itself; twisted's form parsing would cost 0.1 ms a request.
        protocol._channel.headers_timeout_s = self.server.headers_timeout_s
        protocol._channel.body_timeout_s = self.server.body_timeout_s
        protocol._channel.slow_client_timeout_s = self.server.slow_client_timeout_s
        protocol.requestFactory = partial(PlaneRequest, parsePOSTFormSubmission=False)
        return protocol


daphne_server.HTTPFactory = PlaneFactory


class PlaneServer(daphne_server.Server):
    """Serves one ASGI application on several endpoints."""

    def __init__(
        self,
        application: Any,
        listeners: list[Listener],
        *,
        refuse: Refuse,
        preview: Preview,
        overloaded: Preview,
        max_body_bytes: Callable[[str, int], int],
        drain_s: float,
        linger_s: float,
        slow_client_timeout_s: float,
        headers_timeout_s: float,
        body_timeout_s: float,
        max_connections: int,
        on_ready: Callable[[], None],
        on_leave: Callable[[], list[asyncio.Task[None]]],
        on_drain: Callable[[], None],
        on_deadline: Callable[[], Awaitable[None]],
    ) -> None:
        """`max_body_bytes(host, port)` is a listener's limit; `refuse(host, port, method, path, headers, status)`
        gives headers, body and reason phrase of a response that the server sends itself, b"" for the usual phrase (names of
        headers are in lower case); `preview(host, port, method, path, headers)` gives the whole response if the headers are
        enough to reject the request; `overloaded`, with the same arguments, gives it if no permit is free.

        `on_leave` is called when no more connections are taken and returns what must end before the process does; `on_drain` is
        called when the drain begins, `on_deadline` when streams must end. All run on the loop.
        """
        # Passed ready-made instead of the endpoint strings that Daphne would parse.
        self._by_text = {f"{each.host} {each.port}": each for each in listeners}
        daphne_server.serverFromString = lambda reactor, text: self._by_text[text].endpoint(reactor)
        super().__init__(application, list(self._by_text), ready_callable=on_ready, verbosity=0, server_name="dragoman")
        self.refuse, self.preview, self.overloaded = refuse, preview, overloaded
        self.max_body_bytes = max_body_bytes
        self.drain_s, self.linger_s, self.slow_client_timeout_s = drain_s, linger_s, slow_client_timeout_s
        self.lingers = False
        """Whether the process is about to end, and each response is the last of its connection."""
        self.headers_timeout_s, self.body_timeout_s = headers_timeout_s, body_timeout_s
        self.max_connections = max_connections
        self._on_leave, self._on_drain, self._on_deadline = on_leave, on_drain, on_deadline
        self.ports: list[Any] = []
        self.failed: str | None = None

    def listen_success(self, port: Any) -> None:
        """Keep the port, so that a drain can close it."""
        super().listen_success(port)
        self.ports.append(port)

    def listen_error(self, failure: Any) -> None:
        """Stop the server with the reason if an address is in use."""
        error = failure.value
        if isinstance(error, CannotListenError):
            setting = self._by_text[f"{error.interface} {error.port}"].setting
            self.failed = str(CannotBind(error.interface, error.port, setting, error.socketError))
        else:
            self.failed = failure.getErrorMessage()
        self.stop()

    def create_application(self, protocol: Any, scope: dict[str, Any]) -> Any:
        """Start the application for a request, with some of the headers that Daphne leaves out, and watch for its end."""
        if scope["type"] == "http":
            scope["headers"] = [*scope["headers"], *underscores.headers_of(protocol)]
        queue = super().create_application(protocol, scope)
        task = self.connections.get(protocol, {}).get("application_instance")
        if task is not None:
            task.add_done_callback(partial(self._reap, protocol))
        return queue

    def _reap(self, protocol: Any, task: asyncio.Task[None]) -> None:
        """Called at once, and never raises: Daphne's own checker polls every second and dies on a late error."""
        details = self.connections.get(protocol)
        if details is None or details.get("application_instance") is not task:
            return
        del details["application_instance"]
        error = None if task.cancelled() else task.exception()
        if error is not None:
            logger.error("exception inside application", exc_info=error)
        unfinished = isinstance(protocol, WebRequest) and not protocol.finished
        if not details.get("disconnected") and (error is not None or unfinished):
            protocol.handle_exception(error)
        if details.get("disconnected"):
            self.connections.pop(protocol, None)

    async def handle_reply(self, protocol: Any, message: dict[str, Any]) -> None:
        """Write a message, and wait while the client does not read."""
        await super().handle_reply(protocol, message)
        writable = getattr(protocol, "writable", None)
        if writable is None or writable.is_set():
            return
        try:
            # Not wait_for, which in Python 3.11 loses a cancellation that arrives together with the event: of a client that leaves.
            async with asyncio.timeout(self.slow_client_timeout_s):
                await writable.wait()
        except TimeoutError:
            logger.warning("client stopped reading; connection closed")
            protocol.abort()

    def kill_all_applications(self) -> defer.Deferred[None]:
        """On SIGTERM or SIGINT: drain, as described at the top of this file."""
        return defer.Deferred.fromFuture(asyncio.ensure_future(self._drain()))

    async def _drain(self) -> None:
        for port in self.ports:
            await defer.maybeDeferred(port.stopListening).asFuture(asyncio.get_running_loop())
        others = self._on_leave()
        await self._linger(others)
        self._on_drain()
        for connection in list(self.connections):
            if isinstance(connection, WebSocketProtocol):  # a page stays open for days
                connection.serverClose()
        late = await self._wait(self.drain_s)
        if late:
            await self._on_deadline()
            late = await self._wait(FINAL_EVENT_S)
        for task in late:
            task.cancel()
        await asyncio.gather(*late, *others, return_exceptions=True)

    async def _linger(self, others: list[asyncio.Task[None]]) -> None:
        """Answer requests on open connections, until all are closed and the others have ended, or `linger_s` has passed."""
        self.lingers = self.linger_s > 0
        deadline = asyncio.get_running_loop().time() + self.linger_s
        while CONNECTIONS.total or not all(task.done() for task in others):
            if asyncio.get_running_loop().time() >= deadline:
                break
            await asyncio.sleep(LINGER_CHECK_S)
        self.lingers = False

    async def _wait(self, timeout_s: float) -> list[asyncio.Task[None]]:
        """The applications that are still running after `timeout_s`."""
        tasks = [d["application_instance"] for d in self.connections.values() if d.get("application_instance")]
        if not tasks:
            return []
        return list((await asyncio.wait(tasks, timeout=timeout_s))[1])
