"""What stands between a browser and the admin: what its pages may load, and how often somebody may try to log in."""

from __future__ import annotations

import ipaddress
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
TRIES_OF_ONE = 5
"""In the window, of one address as one user."""
TRIES = 50
"""In the window, of one address as anybody, and of anybody as one user."""


def content_security_policy(get_response: Next) -> Next:
    """A middleware: scripts and forms of our own alone, in nobody's frame."""

    def answer(request: HttpRequest) -> Any:
        response = get_response(request)
        response.headers.setdefault("Content-Security-Policy", CONTENT_SECURITY_POLICY)
        return response

    return answer


def login_throttle(get_response: Next) -> Next:
    """A middleware: tries are counted before a password is looked at, so that many at once are no way around."""

    def answer(request: HttpRequest) -> Any:
        if request.method == "POST" and request.path == reverse("admin:login"):
            limits = _limits(request, request.POST.get("username", ""))
            if any(_count(key) > most for key, most in limits.items()):
                text = f"Too many attempts to log in. Try again in {WINDOW_S // 60} minutes."
                return HttpResponse(text, "text/plain", 429, headers={"Retry-After": str(WINDOW_S)})
        return get_response(request)

    return answer


@receiver(user_logged_in)
def _forget(request: HttpRequest | None, user: Any, **_: Any) -> None:
    """Who got in starts anew."""
    if request is not None:
        cache.delete(next(iter(_limits(request, user.get_username()))))


def _limits(request: HttpRequest, username: str) -> dict[str, int]:
    """How many tries each counter allows; the first is that of this user from this address."""
    address, name = _address(request), sha256(username.strip().encode()).hexdigest()
    return {f"login-{address}-{name}": TRIES_OF_ONE, f"login-{address}": TRIES, f"login-{name}": TRIES}


def _count(key: str) -> int:
    cache.add(key, 0, WINDOW_S)
    try:
        return int(cache.incr(key))
    except ValueError:  # it ran out between the two
        return 1


def _address(request: HttpRequest) -> str:
    """The client's address; what our own proxy says of it, and of IPv6 the network, since hosts change the rest."""
    text = request.META.get("REMOTE_ADDR", "")
    if settings.BEHIND_TLS:
        text = request.META.get("HTTP_X_FORWARDED_FOR", text).rpartition(",")[2].strip()
    try:
        address = ipaddress.ip_address(text)
    except ValueError:
        return "unknown"
    if address.version == 6:
        return str(ipaddress.ip_network((address, 64), strict=False).network_address)
    return str(address)
