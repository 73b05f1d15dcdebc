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
    """The name of the request's key, for audit events; `anonymous` where no keys are required. Raises Unauthorized or
    Forbidden.
    """
    if not settings.API_KEY_REQUIRED:
        return anonymous
    kind, _, text = request.headers.get("Authorization", "").partition(" ")
    if kind.lower() != "bearer":
        raise Unauthorized
    try:
        key = ApiKey.objects.get_from_key(text.strip())
    except ApiKey.DoesNotExist as error:
        raise Unauthorized from error
    if key.has_expired:
        raise Unauthorized
    if SCOPE not in key.scopes or key.deployment_id is not None:
        raise Forbidden
    return str(key.name)
