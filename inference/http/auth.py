"""Authenticates API keys against the snapshot; no database access, no stored secrets."""

from __future__ import annotations

from typing import TYPE_CHECKING

from inference.errors import Forbidden, Unauthorized

if TYPE_CHECKING:
    from management.snapshot import ApiKeyEntry, Snapshot


class Authenticator:
    """Checks `Authorization: Bearer <key>`. If keys are not required, any header is accepted and ignored."""

    def __init__(self, required: bool) -> None:
        self.required = required

    def check(self, header: str | None, scope: str, snapshot: Snapshot) -> ApiKeyEntry | None:
        """The API key of the request; raises Unauthorized or Forbidden."""
        if not self.required:
            return None
        kind, _, key = (header or "").partition(" ")
        entry = snapshot.find_key(key.strip()) if kind.lower() == "bearer" else None
        if entry is None:
            raise Unauthorized("Unauthorized")
        if scope not in entry.scopes:
            raise Forbidden(f"This API key lacks the scope {scope!r}.")
        return entry
