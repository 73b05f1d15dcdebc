"""Authenticates API keys against the snapshot; no database access, no stored secrets."""

from __future__ import annotations

from typing import TYPE_CHECKING

from inference.errors import Forbidden, Unauthorized
from inference.workers.scope import scope_id

if TYPE_CHECKING:
    from management.snapshot import ApiKeyEntry, Snapshot


class Authenticator:
    """Checks `Authorization: Bearer <key>`. If keys are not required, any header is accepted and
    ignored.
    """

    def __init__(self, required: bool) -> None:
        self.required = required

    def check(self, header: str | None, scope: str, snapshot: Snapshot) -> ApiKeyEntry | None:
        """The API key of the request; raises Unauthorized or Forbidden.

        A deployment's own key opens nothing else, and a deployment that has one is never open without a key.
        """
        deployment = scope_id()
        locked = bool(deployment) and any(key.deployment == deployment for key in snapshot.keys.values())
        if not self.required and not locked:
            return None
        kind, _, key = (header or "").partition(" ")
        entry = snapshot.find_key(key.strip()) if kind.lower() == "bearer" else None
        if entry is None or (entry.deployment and entry.deployment != deployment):
            raise Unauthorized("Unauthorized")
        if scope not in entry.scopes:
            raise Forbidden(f"This API key lacks the scope {scope!r}.")
        return entry
