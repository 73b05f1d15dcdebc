"""Checks API keys on the control plane's APIs, by the rule of all planes: only a server that is bound beyond loopback, or
is told to, asks for them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from django.conf import settings

from management.models import ApiKey

if TYPE_CHECKING:
    from django.http import HttpRequest

SCOPE = "manage"
KEY_REQUIRED = "an API key is required"


class Unauthorized(Exception):
    """No key, or one that is unknown, revoked or expired."""


class Forbidden(Exception):
    """The key is valid and opens nothing here: it lacks the scope `manage`, or is one deployment's."""


def caller(request: HttpRequest, anonymous: str) -> str:
    """The name of the request's key, for audit events; `anonymous` for a request without a key that opens these APIs,
    where keys are not required. Raises Unauthorized or Forbidden.
    """
    key = _key_of(request)
    if key is not None and SCOPE in key.scopes and key.deployment_id is None:
        return str(key.name)
    if not settings.API_KEY_REQUIRED:
        return anonymous
    raise Unauthorized if key is None else Forbidden


def _key_of(request: HttpRequest) -> ApiKey | None:
    """The first known key that has not expired: the bearer's, else that of `x-api-key`."""
    kind, _, bearer = request.headers.get("Authorization", "").partition(" ")
    for text in (bearer.strip() if kind.lower() == "bearer" else "", request.headers.get("X-Api-Key", "")):
        if not text:
            continue
        try:
            key: ApiKey = ApiKey.objects.get_from_key(text)
        except ApiKey.DoesNotExist:
            continue
        if not key.has_expired:
            return key
    return None
