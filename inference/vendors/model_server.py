"""What the answers of DJL Serving and TorchServe have in common: both descend from Multi Model Server."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from inference.http.exchange import Response

if TYPE_CHECKING:
    from inference.http.exchange import Headers

NO_ROUTE = "Requested resource is not found, please refer to API document."
NO_METHOD = "Requested method is not allowed, please refer to API document."
NO_CACHE: Headers = [
    (b"pragma", b"no-cache"),
    (b"cache-control", b"no-cache; no-store, must-revalidate, private"),
    (b"expires", b"Thu, 01 Jan 1970 00:00:00 UTC"),
]


def answer_headers(path: str, request_id: str) -> Headers:
    """The headers of every response: it names its request, and is not cached."""
    return [(b"x-request-id", request_id.encode()), *NO_CACHE]


def pretty(value: Any, status: int = 200, headers: Headers | None = None) -> Response:
    """A JSON response, indented, with a line break at the end."""
    return Response(status, msgspec.json.format(msgspec.json.encode(value), indent=2) + b"\n", headers=headers or [])
