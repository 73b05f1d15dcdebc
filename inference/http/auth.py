"""Authenticates API keys against the snapshot; no database access, no stored secrets."""

from __future__ import annotations

import hmac
from typing import TYPE_CHECKING

from inference.errors import Forbidden, Unauthorized
from inference.workers.scope import scope_id
from management.snapshot import ApiKeyEntry, hash_key

if TYPE_CHECKING:
    from collections.abc import Iterable

    from management.snapshot import Snapshot

OWN_SCOPES = frozenset({"infer", "metrics"})


class Authenticator:
    """Checks `Authorization: Bearer <key>`. If keys are not required, any header is accepted and
    ignored, except below the link of a deployment that has a key of its own.
    """

    def __init__(self, required: bool, own_keys: Iterable[str] = ()) -> None:
        """`own_keys` are the server's own keys, which open inference routes and metrics of every deployment."""
        self.required = required
        self.own = [
            ApiKeyEntry(f"own-{number}", "", hash_key(key), OWN_SCOPES, None) for number, key in enumerate(own_keys, 1)
        ]

    def check(self, header: str | None, scope: str, snapshot: Snapshot) -> ApiKeyEntry | None:
        """The API key of the request; raises Unauthorized or Forbidden.

        A deployment's own key opens its inference and nothing else: the caller limits the request to `deployment` of the
        entry. In the scope of a deployment that has one (its link), a key is needed even if keys are not required elsewhere.
        """
        deployment = scope_id()
        locked = bool(deployment) and any(key.deployment == deployment for key in snapshot.keys.values())
        if not self.required and not locked:
            return None
        kind, _, key = (header or "").partition(" ")
        entry = self._find(key.strip(), snapshot) if kind.lower() == "bearer" else None
        if entry is None or (deployment and entry.deployment not in ("", deployment)):
            raise Unauthorized("Unauthorized")
        if scope not in entry.scopes or (entry.deployment and scope != "infer"):
            raise Forbidden(f"This API key lacks the scope {scope!r}.")
        return entry

    def _find(self, key: str, snapshot: Snapshot) -> ApiKeyEntry | None:
        """The entry of a key: the server's own, else a registered one."""
        given = hash_key(key)
        own = [entry for entry in self.own if hmac.compare_digest(given, entry.hashed_key)]
        return own[0] if own else snapshot.find_key(key)


def tenant_of(key: ApiKeyEntry | None) -> str:
    """The tenant of a request: its key's public prefix, "" without a key."""
    return "" if key is None else key.prefix


def deployment_of(key: ApiKeyEntry | None) -> str:
    """The public id of the only deployment that a request may use; "": all."""
    return "" if key is None else key.deployment
