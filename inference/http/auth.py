"""Authenticates API keys against the snapshot; no database access, no stored secrets."""

from __future__ import annotations

import hmac
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from inference.errors import Forbidden, Unauthorized
from inference.workers.scope import scope_id
from management.snapshot import ApiKeyEntry, hash_key

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from management.snapshot import Snapshot

OWN_SCOPES = frozenset({"infer", "metrics"})


@dataclass(frozen=True, slots=True)
class Credentials:
    """What a request presents: `Authorization: Bearer <key>` or, as Anthropic's and Azure's clients do, `x-api-key:
    <key>`.
    """

    authorization: str | None = field(default=None, repr=False)
    api_key: str | None = field(default=None, repr=False)

    @classmethod
    def in_headers(cls, headers: Mapping[bytes, bytes]) -> Credentials:
        """Those of an HTTP request; names are in lower case."""
        given = (headers.get(name) for name in (b"authorization", b"x-api-key"))
        return cls(*(None if value is None else value.decode("latin-1") for value in given))

    @classmethod
    def in_metadata(cls, metadata: Mapping[str, Any]) -> Credentials:
        """Those of a gRPC call."""
        given = (metadata.get(name) for name in ("authorization", "x-api-key"))
        return cls(*(None if value is None else str(value) for value in given))

    @property
    def keys(self) -> list[str]:
        """The keys, the bearer's first."""
        kind, _, bearer = (self.authorization or "").partition(" ")
        return [key for key in (bearer.strip() if kind.lower() == "bearer" else "", self.api_key) if key]


class Authenticator:
    """Finds the key of a request. If keys are not required, a key that is unknown or does not open the route is as
    none, since clients send placeholders; the link of a deployment that has a key of its own needs one all the same.
    """

    def __init__(self, required: bool, own_keys: Iterable[str] = ()) -> None:
        """`own_keys` are the server's own keys, which open inference routes and metrics of every deployment."""
        self.required = required
        self.own = [
            ApiKeyEntry(f"own-{number}", "", hash_key(key), OWN_SCOPES, None) for number, key in enumerate(own_keys, 1)
        ]

    def check(self, presented: Credentials, scope: str, snapshot: Snapshot) -> ApiKeyEntry | None:
        """The API key of the request, None without one; raises Unauthorized or Forbidden.

        A deployment's own key opens its inference and nothing else: the caller limits the request to `deployment` of the
        entry. In the scope of a deployment that has one (its link), a key is needed even if keys are not required elsewhere.
        """
        deployment = scope_id()
        locked = bool(deployment) and any(key.deployment == deployment for key in snapshot.keys.values())
        found = (self._find(key, snapshot) for key in presented.keys)
        entry = next((entry for entry in found if entry is not None), None)
        if entry is not None and deployment and entry.deployment not in ("", deployment):
            entry = None
        if entry is not None and scope in entry.scopes and not (entry.deployment and scope != "infer"):
            return entry
        if not self.required and not locked:
            return None
        if entry is None:
            raise Unauthorized("Unauthorized")
        raise Forbidden(f"This API key lacks the scope {scope!r}.")

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
