"""An HTTP/1.1 connection with absolute deadlines and early refusal.

Twisted's timeout restarts with every byte, which a slow client can abuse. A request that is refused by its headers
gets the response before its body is read; then the connection discards input for LINGER_S, so that the client sees
the response, and closes.
"""

from __future__ import annotations

import math
from typing import Any

from twisted.internet import reactor
from twisted.web import http

from inference.server.phrases import phrase

LAST_WORDS_S = 1.0
LINGER_S, LINGER_BYTES = 2.0, 80 << 20
"""How long, and for how many bytes, input is discarded after a refusal."""
LARGE_ANSWER_BYTES = 1 << 16
"""Buffered bytes above which a stream waits for the client, and a whole response is watched."""
LEAST_READ_BYTES = 1 << 14
"""A client must read so much of a watched response, or what is left of it, each time that it is looked at."""


class DeadlineChannel(http.HTTPChannel):
    """Twisted's channel with deadlines; it also refuses header lines that are folded over several lines."""

    headers_timeout_s = 10.0
    body_timeout_s = 60.0
    slow_client_timeout_s = 30.0
    admit: Any = None
    """Called with the address that the client has connected to; False closes the connection."""
    when_lost: Any = None
    """Called once, when the channel leaves its connection."""
    _deadline: Any = None
    _discardable: float | None = None
    """Set after a refusal: the bytes to discard before the connection closes."""
    _body_left: float = math.inf
    _reading: Any = None
    """Checks whether the client reads a large response."""

    def connectionMade(self) -> None:
        """Start the deadline for the first request's headers."""
        super().connectionMade()
        if self.admit is not None and not self.admit(self.transport.getHost()):
            self.transport.abortConnection()
            return
        self._expect(self.headers_timeout_s)

    def dataReceived(self, data: bytes) -> None:
        """Start the deadline of a further request with its first byte."""
        if self._discardable is not None:
            self._throw_away(len(data))
            return
        if self._deadline is None and not self.requests:
            self._expect(self.headers_timeout_s)
        super().dataReceived(data)

    def lineLengthExceeded(self, line: bytes) -> None:
        """Called by Twisted, which would close the connection without an answer."""
        if self._discardable is None:
            self._refuse_head(414 if self._receivedHeaderSize == 0 else 431)

    def headerReceived(self, line: bytes) -> bool:
        """Called by Twisted with a whole header; refuses one too many."""
        if self._receivedHeaderCount >= self.maxHeaders:
            self._refuse_head(431)
            return False
        taken: bool = super().headerReceived(line)
        return taken

    def lineReceived(self, line: bytes) -> None:
        """Refuse heads that are too long, and continuation lines: obsolete (RFC 9112 section 5.2) and used for request
        smuggling.
        """
        if self._discardable is not None:
            return
        if self._receivedHeaderSize + len(line) > self.totalHeadersSize:
            self._refuse_head(431)
            return
        if line[:1] in (b" ", b"\t"):
            self._respondToBadRequestAndDisconnect()
            return
        super().lineReceived(line)

    def rawDataReceived(self, data: bytes) -> None:
        """Body bytes; discarded after a refusal."""
        if self._discardable is not None:
            self._throw_away(len(data))
            return
        super().rawDataReceived(data)

    def allHeadersReceived(self) -> None:
        """Refuse a request with a body here, or start the deadline of the body.

        Twisted answers `Expect: 100-continue` after this check, so that a refused client does not send its body.
        """
        if self.length != 0:
            answer = self.requests[-1].refusal(self._command, self._path, self._version, self.length)
            if answer is not None:
                self._body_left = math.inf if self.length is None else self.length
                self.send_refusal(*answer)
                return
        self._expect(self.body_timeout_s)
        super().allHeadersReceived()

    def _maybeChooseTransferDecoder(self, header: bytes, data: bytes) -> bool:
        """Accept exactly one `chunked` without a length: anything else may end at another byte for a proxy (RFC 9112
        section 6.3).
        """
        coding = header == b"Transfer-Encoding"
        if coding and (data.lower() != b"chunked" or self._version != b"HTTP/1.1"):
            self._respondToBadRequestAndDisconnect()
            return False
        taken: bool = super()._maybeChooseTransferDecoder(header, data)
        return taken

    def send_refusal(
        self, status: int, headers: list[tuple[bytes, bytes]], body: bytes, reason: bytes = b""
    ) -> None:  # fmt: skip
        """Send a response instead of the application, then close."""
        if self._discardable is not None:
            return
        self._discardable = LINGER_BYTES
        lines = [b"HTTP/1.1 %d %b" % (status, phrase(status, reason))]
        lines += [b"%b: %b" % pair for pair in headers]
        lines += [b"connection: close", b"content-length: %d" % len(body), b"", b""]
        self.transport.write(b"\r\n".join(lines) + body)
        self._met()
        self._deadline = reactor.callLater(LINGER_S, self._hang_up)

    def _refuse_head(self, status: int) -> None:
        text = f"A request's line and headers may have {self.totalHeadersSize} bytes and {self.maxHeaders} headers."
        self.send_refusal(status, [(b"content-type", b"text/plain; charset=utf-8")], text.encode())

    def _respondToBadRequestAndDisconnect(self) -> None:
        self.send_refusal(400, [], b"")

    def _throw_away(self, size: int) -> None:
        if self._discardable is None:
            return
        self._discardable -= size
        self._body_left -= size
        if self._discardable <= 0 or self._body_left <= 0:
            self._hang_up()

    def _hang_up(self) -> None:
        self._met()
        self.loseConnection()
        # A client that keeps sending may not read either; the response would never be flushed.
        self._deadline = reactor.callLater(LAST_WORDS_S, self.transport.abortConnection)

    def allContentReceived(self) -> None:
        """The request is complete; the channel has no deadline for serving it."""
        if self._discardable is not None:
            return
        self._met()
        super().allContentReceived()

    def requestDone(self, request: Any) -> None:
        """The response is complete; a large one must also be read in time, and any if the connection ends with it: no further
        request has a deadline, and over TLS the connection waits for the client's farewell.
        """
        super().requestDone(request)
        if self._reading is None and (not self.persistent or self._unsent() > LARGE_ANSWER_BYTES):
            self._watch(self._unsent())

    def connectionLost(self, reason: Any) -> None:
        """Cancel the deadlines."""
        self.leave()
        super().connectionLost(reason)

    def leave(self) -> None:
        """The connection ended or was upgraded."""
        self._met()
        if self._reading is not None and self._reading.active():
            self._reading.cancel()
        when_lost, self.when_lost = self.when_lost, None
        if when_lost is not None:
            when_lost()

    def _unsent(self) -> int:
        """Bytes that wait for the client to read."""
        transport = self._socket()
        if transport is None:
            return 0
        return len(transport.dataBuffer) - transport.offset + int(transport._tempDataLen)

    def _socket(self) -> Any:
        """Twisted's transport below TLS, if any; None once the connection is lost."""
        return getattr(self.transport, "transport", None) or self.transport

    def _watch(self, before: int) -> None:
        self._reading = reactor.callLater(self.slow_client_timeout_s, self._still_unread, before)

    def _still_unread(self, before: int) -> None:
        """End the connection if the client has read next to nothing since the last check.

        What the kernel has taken it still delivers: then only Twisted's TLS waits, for the client's close_notify.
        """
        self._reading, now, below = None, self._unsent(), self._socket()
        unread = before - now < LEAST_READ_BYTES
        if now and unread:
            self.transport.abortConnection()
        elif unread and not self.persistent:
            if below is not None:
                below.loseConnection()
        elif not self.persistent or now > LARGE_ANSWER_BYTES:
            self._watch(now)

    def _expect(self, timeout_s: float) -> None:
        self._met()
        self._deadline = reactor.callLater(timeout_s, self._too_late)

    def _met(self) -> None:
        if self._deadline is not None and self._deadline.active():
            self._deadline.cancel()
        self._deadline = None

    def _too_late(self) -> None:
        self.send_refusal(408, [], b"")
        self._hang_up()
