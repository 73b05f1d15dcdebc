"""Host and Origin checks: protection from DNS rebinding and cross-site requests.

A page in a user's browser can reach servers on the user's loopback and network. A foreign `Host` means DNS rebinding;
a foreign `Origin`, or `Sec-Fetch-Site` (W3C Fetch Metadata), means a cross-site request. Programs send neither
`Origin` nor `Sec-Fetch-Site` and are not affected.
"""

from __future__ import annotations

import ipaddress
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from inference.errors import ForeignHost, ForeignOrigin

if TYPE_CHECKING:
    from collections.abc import Mapping

    from inference.http.exchange import Headers

SAFE_METHODS = frozenset({"GET", "HEAD", "OPTIONS"})
OWN_SITES = (b"same-origin", b"none")
"""`Sec-Fetch-Site` of our own pages, and of an address that a user typed."""
SAFE_HEADERS = frozenset({"accept", "accept-language", "content-language", "content-type"})
"""Headers that a page may always send, as in vLLM's middleware."""
ANY = "*"
DEFAULT_PORTS = {b"http": b":80", b"https": b":443"}
_HOST = re.compile(r"(?:\[([0-9a-f:.]+)\]|([a-z0-9._-]+))(?::\d{1,5})?", re.IGNORECASE | re.ASCII)


@dataclass(frozen=True, slots=True)
class Preflight:
    """The answer to a CORS preflight request; `refused` says why the page may not send what it asked for."""

    headers: Headers
    refused: str


@dataclass(frozen=True, slots=True)
class Sites:
    """`hosts` are additional host names: `example.com`, `.example.com` with its subdomains, `*` for all. `origins`
    are the allowed foreign origins: `https://example.com`, or `*`. Their pages may use `methods` (upper case) and send the
    headers `headers` (lower case), `*` for all, and with `credentials` the user's cookies and certificates.
    """

    hosts: frozenset[str] = frozenset()
    origins: frozenset[str] = frozenset()
    methods: frozenset[str] = frozenset({ANY})
    headers: frozenset[str] = frozenset({ANY})
    credentials: bool = False

    def check_host(self, headers: Mapping[bytes, bytes]) -> None:
        """Raise ForeignHost unless the Host header names this server.

        IP addresses are accepted, since DNS rebinding needs a name; so are names without a dot, which public DNS
        cannot resolve.
        """
        header = headers.get(b"host")
        if header is None or ANY in self.hosts:
            return
        match = _HOST.fullmatch(header.decode("latin-1").strip())
        if match is None:
            raise ForeignHost
        if match[1] is not None or _is_address(match[2]):
            return
        name = match[2].lower().removesuffix(".")
        if "." not in name or name.endswith(".localhost") or name in self.hosts:
            return
        if not any(name.endswith(host) or name == host[1:] for host in self.hosts if host.startswith(".")):
            raise ForeignHost

    def check_origin(self, headers: Mapping[bytes, bytes]) -> None:
        """Raise ForeignOrigin if the browser's headers say that the request is cross-site and the origin is not
        allowed.
        """
        origin = headers.get(b"origin")
        if origin is not None:
            if not (self._is_own(origin, headers) or self.allows_origin(origin)):
                raise ForeignOrigin
        elif headers.get(b"sec-fetch-site", b"none") not in OWN_SITES:
            raise ForeignOrigin

    def allows_origin(self, origin: bytes) -> bool:
        """Whether this origin is in `origins`."""
        return ANY in self.origins or origin.decode("latin-1").lower() in self.origins

    def answer_headers(self, headers: Mapping[bytes, bytes]) -> Headers:
        """The CORS response headers for an allowed origin; empty for all others."""
        origin = headers.get(b"origin")
        if origin is None or not self.allows_origin(origin):
            return []
        return [
            (b"access-control-allow-origin", origin),
            (b"access-control-expose-headers", b"x-request-id, retry-after, retry-after-ms"),
            *([(b"access-control-allow-credentials", b"true")] if self.credentials else []),
            (b"vary", b"origin"),
        ]

    def preflight(self, method: str, headers: Mapping[bytes, bytes]) -> Preflight | None:
        """The answer to a CORS preflight request from an allowed origin; None for any other request."""
        wanted = headers.get(b"access-control-request-method")
        allowed = self.answer_headers(headers)
        if method != "OPTIONS" or wanted is None or not allowed:
            return None
        asked = headers.get(b"access-control-request-headers", b"")
        names = {name.strip().lower() for name in asked.decode("latin-1").split(",")} - {""}
        refused = [] if ANY in self.methods or wanted.decode("latin-1") in self.methods else ["method"]
        if ANY not in self.headers and not names <= self.headers | SAFE_HEADERS:
            refused.append("headers")
        methods = wanted if ANY in self.methods else _listed(self.methods)
        named = asked if ANY in self.headers else _listed(self.headers | SAFE_HEADERS)
        return Preflight(
            [
                *allowed,
                (b"access-control-allow-methods", methods),
                *([(b"access-control-allow-headers", named)] if named else []),
                (b"access-control-max-age", b"600"),
            ],
            f"Disallowed CORS {', '.join(refused)}" if refused else "",
        )

    @staticmethod
    def _is_own(origin: bytes, headers: Mapping[bytes, bytes]) -> bool:
        """The scheme is not compared, since a TLS-terminating proxy changes it; the scheme's default port may be
        omitted.
        """
        scheme, _, host = origin.lower().partition(b"://")
        port = DEFAULT_PORTS.get(scheme)
        return port is not None and host != b"" and host == headers.get(b"host", b"").lower().removesuffix(port)


def _listed(names: frozenset[str]) -> bytes:
    return ", ".join(sorted(names)).encode("latin-1")


def _is_address(text: str) -> bool:
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return False
    return True
