"""Server-sent events as bytes."""

from __future__ import annotations

from typing import Any

import msgspec

_encode = msgspec.json.Encoder().encode

DONE = b"data: [DONE]\n\n"


def event(value: Any) -> bytes:
    """One `data:` frame with a JSON value."""
    return b"data: " + _encode(value) + b"\n\n"
