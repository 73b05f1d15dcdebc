"""Requests that a client sends twice under one `Idempotency-Key`: computed once, answered as often as they are asked.

A key belongs to an API key and a route, for KEPT_S. The first request under it leaves a fingerprint. While it runs, the same request is
told to come again; then it gets the stored response. Another request under the key is refused, and so is the repetition of a
stream that ended well, of which nothing else is kept. Responses are kept in this process, the oldest give way; a request that failed leaves nothing.
"""

from __future__ import annotations

import hashlib
import time
from collections import OrderedDict
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from inference.errors import InvalidRequest, NotReplayable, OtherRequest, StillRunning

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

HEADER = "idempotency-key"
MAX_CHARACTERS = 255
KEPT_S = 24 * 3600.0
RECORD_BYTES = 1024
"""What a record takes besides its response's body."""
PASSING = (408, 409, 425, 429)
"""Statuses that another attempt may turn into an answer, besides those from 500 on."""
OWN_HEADERS = (b"content-length", b"connection", b"x-request-id", b"traceresponse", b"vary", b"date", b"server")
OWN_PREFIXES = (b"x-ratelimit-", b"access-control-")
"""Headers that belong to one exchange, not to the response."""

Name = tuple[str, str, str]
"""The API key's prefix, the route, and the client's key."""


@dataclass(frozen=True, slots=True)
class StoredResponse:
    """A whole response."""

    status: int
    headers: list[tuple[bytes, bytes]]
    body: bytes


@dataclass(slots=True)
class _Record:
    """A request under a key. Without a `response` it runs, or its answer is not replayable."""

    fingerprint: bytes
    since: float
    running: bool = True
    response: StoredResponse | None = None
    size: int = RECORD_BYTES


@dataclass(slots=True)
class Recording:
    """What an exchange sends, as ASGI messages."""

    status: int = 0
    headers: list[tuple[bytes, bytes]] = field(default_factory=list)
    body: bytes | None = None
    is_stream: bool = False
    ended: bool = False
    failed: bool = False
    """Whether the stream told of an error."""

    def note(self, message: dict[str, Any]) -> None:
        """A message is sent."""
        if message["type"] == "http.response.start":
            self.status, self.headers = message["status"], list(message.get("headers", []))
        elif message.get("more_body"):
            self.is_stream = True
        else:
            self.ended = True
            if not self.is_stream:
                self.body = message.get("body", b"")


class IdempotencyStore:
    """The records of this process, in at most `max_bytes`; with 0 the header is ignored."""

    def __init__(self, max_bytes: int = 0, clock: Callable[[], float] = time.monotonic) -> None:
        self.max_bytes, self._clock = max_bytes, clock
        self._records: OrderedDict[Name, _Record] = OrderedDict()
        self._bytes = 0
        self.replayed: Callable[[], None] = lambda: None
        """Called for every response that is sent again."""

    def find(self, name: Name, fingerprint: bytes) -> StoredResponse | None:
        """The response to send again, None if the request is the first under its key. Raises StillRunning, NotReplayable or
        OtherRequest.
        """
        self._forget_old()
        record = self._records.get(name)
        if record is None:
            return None
        if record.fingerprint != fingerprint:
            raise OtherRequest("This Idempotency-Key was used for another request.")
        if record.running:
            raise StillRunning("The request with this Idempotency-Key is still running.")
        if record.response is None:
            raise NotReplayable("The answer to this Idempotency-Key was a stream, or too large; it is not kept.")
        self.replayed()
        return record.response

    @contextmanager
    def recording(self, name: Name, fingerprint: bytes) -> Iterator[Recording]:
        """Keep what is sent in this block, unless it fails; `find` has returned None."""
        record, recording = _Record(fingerprint, self._clock()), Recording()
        self._records[name] = record
        self._bytes += record.size
        try:
            yield recording
        finally:
            self._close(name, record, recording)

    def _close(self, name: Name, record: _Record, recording: Recording) -> None:
        record.running = False
        passing = recording.status >= 500 or recording.status in PASSING
        if not recording.ended or recording.failed or passing:
            self._drop(name)
            return
        if recording.body is not None and RECORD_BYTES + len(recording.body) <= self.max_bytes // 8:
            record.response = StoredResponse(recording.status, _own(recording.headers), recording.body)
            record.size += len(recording.body)
            self._bytes += len(recording.body)
        for other in list(self._records):
            if self._bytes <= self.max_bytes:
                break
            if not self._records[other].running:
                self._drop(other)

    def _forget_old(self) -> None:
        now = self._clock()
        while self._records:
            name, record = next(iter(self._records.items()))
            if record.running or now - record.since < KEPT_S:
                return
            self._drop(name)

    def _drop(self, name: Name) -> None:
        self._bytes -= self._records.pop(name).size


def _own(headers: list[tuple[bytes, bytes]]) -> list[tuple[bytes, bytes]]:
    lower = [(name.lower(), value) for name, value in headers]
    return [(n, v) for n, v in lower if n not in OWN_HEADERS and not n.startswith(OWN_PREFIXES)]


def fingerprint_of(*parts: bytes) -> bytes:
    """What is the same for the same request: its path, its query and its body."""
    digest = hashlib.sha256()
    for part in parts:
        digest.update(b"%d:" % len(part) + part)
    return digest.digest()


def checked(key: str) -> str:
    """The client's key; raises InvalidRequest."""
    if not (0 < len(key) <= MAX_CHARACTERS and key.isascii() and key.isprintable()):
        text = f"Idempotency-Key must have 1 to {MAX_CHARACTERS} printable ASCII characters."
        raise InvalidRequest(text, "Idempotency-Key")
    return key
