"""One HTTP/1.1 connection with absolute deadlines, and a body that is taken only when its headers deserve it.

Twisted's own timeout starts anew with every byte, so a client that drips one now and then would stay for ever. What can
be refused by its headers is answered before any of its body is kept, and the connection ends there: what the client
still sends is thrown away for a moment, so that the answer reaches it, and then nobody listens any more.
"""

from __future__ import annotations

import math
from typing import Any

from twisted.internet import reactor
from twisted.web import http

LAST_WORDS_S = 1.0
LINGER_S, LINGER_BYTES = 2.0, 80 << 20
"""How long, and for how much, a client that was turned away may go on sending."""
LARGE_ANSWER_BYTES = 1 << 16
"""Behind so much a stream waits for its client; whole answers are watched."""


class DeadlineChannel(http.HTTPChannel):
    """Twisted's channel, which also refuses header lines folded over several lines."""

    headers_timeout_s = 10.0
    body_timeout_s = 60.0
    slow_client_timeout_s = 30.0
    when_lost: Any = None
    """Called once, when the channel leaves its connection."""
    _deadline: Any = None
    _discardable: float | None = None
    """Set once the client was turned away: so many further bytes are thrown away, then the connection ends."""
    _body_left: float = math.inf
    _reading: Any = None
    """Looks at whether the client reads a large answer."""

    def connectionMade(self) -> None:
        """A new connection must send its first request's headers in time."""
        super().connectionMade()
        self._expect(self.headers_timeout_s)

    def dataReceived(self, data: bytes) -> None:
        """The first byte of a further request starts its deadline."""
        if self._discardable is not None:
            self._throw_away(len(data))
            return
        if self._deadline is None and not self.requests:
            self._expect(self.headers_timeout_s)
        super().dataReceived(data)

    def lineReceived(self, line: bytes) -> None:
        """A continuation line is obsolete (RFC 9112 section 5.2) and an old way to smuggle; it is refused."""
        if self._discardable is not None:
            return
        if line[:1] in (b" ", b"\t"):
            self._respondToBadRequestAndDisconnect()
            return
        super().lineReceived(line)

    def rawDataReceived(self, data: bytes) -> None:
        """Bytes of a body, of which none is wanted any more once the client was turned away."""
        if self._discardable is not None:
            self._throw_away(len(data))
            return
        super().rawDataReceived(data)

    def allHeadersReceived(self) -> None:
        """A request with a body may be refused here; else, from here, the body has its own deadline.

        `Expect: 100-continue` is answered by Twisted behind this, so that nobody is asked for a body in vain.
        """
        if self.length != 0:
            answer = self.requests[-1].refusal(self._command, self._path, self._version, self.length)
            if answer is not None:
                self._body_left = math.inf if self.length is None else self.length
                self.turn_away(*answer)
                return
        self._expect(self.body_timeout_s)
        super().allHeadersReceived()

    def _maybeChooseTransferDecoder(self, header: bytes, data: bytes) -> bool:
        """Exactly one `chunked` and no length beside it: whatever else may end at another byte for a proxy (RFC 9112
        section 6.3).
        """
        coding = header == b"Transfer-Encoding"
        if coding and (data.lower() != b"chunked" or self._version != b"HTTP/1.1"):
            self._respondToBadRequestAndDisconnect()
            return False
        taken: bool = super()._maybeChooseTransferDecoder(header, data)
        return taken

    def turn_away(self, status: int, headers: list[tuple[bytes, bytes]], body: bytes) -> None:
        """Answer in place of the application, and end the connection soon."""
        if self._discardable is not None:
            return
        self._discardable = LINGER_BYTES
        lines = [b"HTTP/1.1 %d %b" % (status, http.RESPONSES.get(status, b"Refused"))]
        lines += [b"%b: %b" % pair for pair in headers]
        lines += [b"connection: close", b"content-length: %d" % len(body), b"", b""]
        self.transport.write(b"\r\n".join(lines) + body)
        self._met()
        self._deadline = reactor.callLater(LINGER_S, self._hang_up)

    def _respondToBadRequestAndDisconnect(self) -> None:
        self.turn_away(400, [], b"")

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
        # A client that sends on may not read either; then the answer is never flushed.
        self._deadline = reactor.callLater(LAST_WORDS_S, self.transport.abortConnection)

    def allContentReceived(self) -> None:
        """The request is complete; how long it takes to serve is not the channel's business."""
        if self._discardable is not None:
            return
        self._met()
        super().allContentReceived()

    def requestDone(self, request: Any) -> None:
        """An answer is complete; a large one must also be read."""
        super().requestDone(request)
        if self._reading is None and self._unsent() > LARGE_ANSWER_BYTES:
            self._watch(self._unsent())

    def connectionLost(self, reason: Any) -> None:
        """Nothing is expected any more."""
        self.leave()
        super().connectionLost(reason)

    def leave(self) -> None:
        """The connection has ended, or belongs to another protocol from here on."""
        self._met()
        if self._reading is not None and self._reading.active():
            self._reading.cancel()
        when_lost, self.when_lost = self.when_lost, None
        if when_lost is not None:
            when_lost()

    def _unsent(self) -> int:
        """Bytes that wait for the client to read."""
        transport = getattr(self.transport, "transport", None) or self.transport  # below TLS
        if transport is None:
            return 0
        return len(transport.dataBuffer) - transport.offset + int(transport._tempDataLen)

    def _watch(self, before: int) -> None:
        self._reading = reactor.callLater(self.slow_client_timeout_s, self._still_unread, before)

    def _still_unread(self, before: int) -> None:
        """Break the connection of a client that has read nothing since."""
        self._reading, now = None, self._unsent()
        if now >= before:
            self.transport.abortConnection()
        elif now > LARGE_ANSWER_BYTES:
            self._watch(now)

    def _expect(self, timeout_s: float) -> None:
        self._met()
        self._deadline = reactor.callLater(timeout_s, self._too_late)

    def _met(self) -> None:
        if self._deadline is not None and self._deadline.active():
            self._deadline.cancel()
        self._deadline = None

    def _too_late(self) -> None:
        self.turn_away(408, [], b"")
        self._hang_up()
