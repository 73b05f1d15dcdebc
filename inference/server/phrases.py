"""The reason phrases of status lines. Twisted's own table ends with HTTP/1.1 of 1999: it has no 422 and no 429."""

from __future__ import annotations

from http import HTTPStatus

PHRASES = {status.value: status.phrase.encode() for status in HTTPStatus}


def phrase(status: int, given: bytes = b"") -> bytes:
    """The phrase that the dialect gave, else the usual one."""
    return given or PHRASES.get(status, b"Refused" if status >= 400 else b"OK")
