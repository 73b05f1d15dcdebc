"""The headers with an underscore in their names that reach applications. Others do not, because gateways write names with a hyphen
so, and one might be taken for the other (CVE-2015-0219).
"""

from __future__ import annotations

from typing import Any

NAMES = (b"model_name", b"model_version")
"""Those of DJL Serving's clients."""


def headers_of(request: Any) -> list[tuple[bytes, bytes]]:
    """Of Twisted's request."""
    return [(name, value) for name in NAMES for value in request.requestHeaders.getRawHeaders(name) or ()]
