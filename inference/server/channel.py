"""One HTTP/1.1 connection with absolute deadlines: for a request's headers, and then for its body.

Twisted's own timeout starts anew with every byte, so a client that drips one now and then would stay for ever.
"""

from __future__ import annotations

from typing import Any

from twisted.internet import reactor
from twisted.web import http

LAST_WORDS_S = 1.0
_TOO_LATE = b"HTTP/1.1 408 Request Timeout\r\nconnection: close\r\ncontent-length: 0\r\n\r\n"


class DeadlineChannel(http.HTTPChannel):
    """Twisted's channel, which also refuses header lines folded over several lines."""

    headers_timeout_s = 10.0
    body_timeout_s = 60.0
    _deadline: Any = None

    def connectionMade(self) -> None:
        """A new connection must send its first request's headers in time."""
        super().connectionMade()
        self._expect(self.headers_timeout_s)

    def dataReceived(self, data: bytes) -> None:
        """The first byte of a further request starts its deadline."""
        if self._deadline is None and not self.requests:
            self._expect(self.headers_timeout_s)
        super().dataReceived(data)

    def lineReceived(self, line: bytes) -> None:
        """A continuation line is obsolete (RFC 9112 section 5.2) and an old way to smuggle; it is refused."""
        if line[:1] in (b" ", b"\t"):
            self._respondToBadRequestAndDisconnect()
            return
        super().lineReceived(line)

    def allHeadersReceived(self) -> None:
        """From here the body has its own deadline."""
        self._expect(self.body_timeout_s)
        super().allHeadersReceived()

    def allContentReceived(self) -> None:
        """The request is complete; how long it takes to serve is not the channel's business."""
        self._met()
        super().allContentReceived()

    def connectionLost(self, reason: Any) -> None:
        """Nothing is expected any more."""
        self._met()
        super().connectionLost(reason)

    def _expect(self, timeout_s: float) -> None:
        self._met()
        self._deadline = reactor.callLater(timeout_s, self._too_late)

    def _met(self) -> None:
        if self._deadline is not None and self._deadline.active():
            self._deadline.cancel()
        self._deadline = None

    def _too_late(self) -> None:
        self.transport.write(_TOO_LATE)
        self.transport.loseConnection()
        # A client that drips may not read either; then the answer is never flushed.
        self._deadline = reactor.callLater(LAST_WORDS_S, self.transport.abortConnection)
