"""Middlewares that protect the admin: a Content-Security-Policy and a limit on login attempts."""

from __future__ import annotations

import ipaddress
import unicodedata
from hashlib import sha256
from typing import TYPE_CHECKING

from django.conf import settings
from django.contrib.auth.signals import user_logged_in
from django.core.cache import cache
from django.dispatch import receiver
from django.http import HttpResponse
from django.urls import reverse

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from django.http import HttpRequest

    Next = Callable[[HttpRequest], Any]

# The admin's theme evaluates the expressions in its attributes (Alpine) and sets its colours in the page.
CONTENT_SECURITY_POLICY = "; ".join(
    (
        "default-src 'self'",
        "script-src 'self' 'unsafe-eval'",
        "style-src 'self' 'unsafe-inline'",
        "img-src 'self' data:",
        "object-src 'none'",
        "base-uri 'none'",
        "form-action 'self'",
        "frame-ancestors 'none'",
    )
)
WINDOW_S = 300
ATTEMPTS_PER_ADDRESS_AND_USER = 5
ATTEMPTS_PER_ADDRESS = ATTEMPTS_PER_USER = 50
"""Login attempts within the window."""


def content_security_policy(get_response: Next) -> Next:
    """Middleware: allow the server's own scripts and forms only, and no framing."""

    def answer(request: HttpRequest) -> Any:
        response = get_response(request)
        response.headers.setdefault("Content-Security-Policy", CONTENT_SECURITY_POLICY)
        return response

    return answer


def login_throttle(get_response: Next) -> Next:
    """Middleware: limit login attempts. Attempts are counted before the password check, so concurrent attempts count too."""

    def answer(request: HttpRequest) -> Any:
        if request.method == "POST" and request.path == reverse("admin:login"):
            limits = _limits(request, request.POST.get("username", ""))
            if any(_count(key) > most for key, most in limits.items()):
                text = f"Too many attempts to log in. Try again in {WINDOW_S // 60} minutes."
                return HttpResponse(text, "text/plain", 429, headers={"Retry-After": str(WINDOW_S)})
        return get_response(request)

    return answer


@receiver(user_logged_in)
def _reset_attempts(request: HttpRequest | None, user: Any, **_: Any) -> None:
    """Reset the counter of this user and address after a successful login."""
    if request is not None:
        cache.delete(next(iter(_limits(request, user.get_username()))))


def _limits(request: HttpRequest, username: str) -> dict[str, int]:
    """The limit of each counter by cache key; the first key counts this user from this address."""
    # As the form reads it: other characters that it takes for the same ones must not begin new counters.
    name = sha256(unicodedata.normalize("NFKC", username.strip()).encode(errors="replace")).hexdigest()
    address = _address(request)
    return {
        f"login-{address}-{name}": ATTEMPTS_PER_ADDRESS_AND_USER,
        f"login-{address}": ATTEMPTS_PER_ADDRESS,
        f"login-{name}": ATTEMPTS_PER_USER,
    }


def _count(key: str) -> int:
    cache.add(key, 0, WINDOW_S)
    try:
        return int(cache.incr(key))
    except ValueError:  # the counter expired between the two calls
        return 1


def _address(request: HttpRequest) -> str:
    """The client's address, from `X-Forwarded-For` behind a proxy; for IPv6 its /64 network, since hosts rotate the rest."""
    text = request.META.get("REMOTE_ADDR", "")
    if settings.BEHIND_TLS:
        text = request.META.get("HTTP_X_FORWARDED_FOR", text).rpartition(",")[2].strip()
    try:
        address = ipaddress.ip_address(text)
    except ValueError:
        return "unknown"
    if address.version == 4:
        return str(address)
    if address.ipv4_mapped is not None:  # an IPv4 client of a socket for both
        return str(address.ipv4_mapped)
    return str(ipaddress.ip_network((address, 64), strict=False).network_address)
