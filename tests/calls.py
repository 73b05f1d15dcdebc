"""One HTTP client for all calls of the tests: a new one reads all certificate authorities, which takes 27 ms of CPU.

Like httpx's own functions it keeps neither connections nor cookies. A call with a `verify` of its own is httpx's.
"""

from __future__ import annotations

from http.cookiejar import CookieJar, DefaultCookiePolicy

import httpx

NO_COOKIES = CookieJar(DefaultCookiePolicy(allowed_domains=()))

client = httpx.Client(timeout=60, limits=httpx.Limits(max_keepalive_connections=0), cookies=NO_COOKIES)
"""Threads may share it."""

delete, get, head, options, post, put, request, stream = (
    client.delete, client.get, client.head, client.options, client.post, client.put, client.request, client.stream
)  # fmt: skip
