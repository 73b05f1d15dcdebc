"""Which names this server may be called by, and which web pages may send it requests that change something.

A page runs where its reader is: it reaches what listens on the reader's loopback and in the reader's network. Two checks
keep it out. A foreign name in `Host` is a page that had its own name point here (DNS rebinding). A foreign `Origin`, or a
`Sec-Fetch-Site` that says so (W3C Fetch Metadata), is a page of another site. Programs send neither header and are asked
for nothing here.
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
"""`Sec-Fetch-Site` of a page of ours, and of an address that a person typed."""
ANY = "*"
DEFAULT_PORTS = {b"http": b":80", b"https": b":443"}
_HOST = re.compile(r"(?:\[([0-9a-f:.]+)\]|([a-z0-9._-]+))(?::\d{1,5})?", re.IGNORECASE | re.ASCII)


@dataclass(frozen=True, slots=True)
class Sites:
    """`hosts` are further names: `example.com`, `.example.com` with what is below it, `*` for all. `origins` are those of
    other sites' pages that are let in: `https://example.com`, or `*`.
    """

    hosts: frozenset[str] = frozenset()
    origins: frozenset[str] = frozenset()

    def check_host(self, headers: Mapping[bytes, bytes]) -> None:
        """Raises ForeignHost unless the request calls the server by a name of its own.

        An address is always taken: no name leads a browser to it. So is a name without a dot, as containers, hosts files
        and local networks have them: such a name cannot be bought, and public DNS has none.
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
        """Raises ForeignOrigin where a browser says that another site's page sent the request."""
        origin = headers.get(b"origin")
        if origin is not None:
            if not (self._is_own(origin, headers) or self.lets_in(origin)):
                raise ForeignOrigin
        elif headers.get(b"sec-fetch-site", b"none") not in OWN_SITES:
            raise ForeignOrigin

    def lets_in(self, origin: bytes) -> bool:
        """Whether pages of this foreign origin may call."""
        return ANY in self.origins or origin.decode("latin-1").lower() in self.origins

    def answer_headers(self, headers: Mapping[bytes, bytes]) -> Headers:
        """What lets a page of an allowed origin read the answer (CORS); nothing for everybody else."""
        origin = headers.get(b"origin")
        if origin is None or not self.lets_in(origin):
            return []
        return [
            (b"access-control-allow-origin", origin),
            (b"access-control-expose-headers", b"x-request-id, retry-after, retry-after-ms"),
            (b"vary", b"origin"),
        ]

    def preflight(self, method: str, headers: Mapping[bytes, bytes]) -> Headers | None:
        """The answer's headers where a browser asks whether an allowed page may send a request; else None."""
        wanted = headers.get(b"access-control-request-method")
        allowed = self.answer_headers(headers)
        if method != "OPTIONS" or wanted is None or not allowed:
            return None
        asked = headers.get(b"access-control-request-headers", b"")
        return [
            *allowed,
            (b"access-control-allow-methods", wanted),
            *([(b"access-control-allow-headers", asked)] if asked else []),
            (b"access-control-max-age", b"600"),
        ]

    @staticmethod
    def _is_own(origin: bytes, headers: Mapping[bytes, bytes]) -> bool:
        """The scheme is not compared, since a proxy that ends TLS changes it; a scheme's own port goes without saying."""
        scheme, _, host = origin.lower().partition(b"://")
        port = DEFAULT_PORTS.get(scheme)
        return port is not None and host != b"" and host == headers.get(b"host", b"").lower().removesuffix(port)


def _is_address(text: str) -> bool:
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return False
    return True
