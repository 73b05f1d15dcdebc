"""TorchServe's token authorisation: the key of `key_file.json` that a call's scope needs.

A valid API key of this server opens the same calls, if it has the scope.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from inference.dialects.torchserve.errors import TokenRefused
from inference.errors import Forbidden, Unauthorized
from inference.http.auth import Authenticator, Credentials

if TYPE_CHECKING:
    from inference.dialects.torchserve.key_file import KeyFile
    from management.snapshot import ApiKeyEntry, Snapshot

KINDS = {"manage": "management", "infer": "inference", "token": "API"}
"""The key for each scope."""


class TokenAuthenticator(Authenticator):
    """Accepts TorchServe's keys, and this server's API keys."""

    def __init__(self, keys: KeyFile, beside: Authenticator) -> None:
        """`beside` is the other planes', which knows the server's own keys."""
        super().__init__(required=True)
        self.keys, self.own = keys, beside.own

    def check(self, presented: Credentials, scope: str, snapshot: Snapshot) -> ApiKeyEntry | None:
        """None for one of TorchServe's keys. Raises TokenRefused."""
        if scope in KINDS and self.keys.opens(KINDS[scope], presented.authorization):
            return None
        try:
            return super().check(presented, scope, snapshot)
        except (Unauthorized, Forbidden) as error:
            raise TokenRefused from error


def key_of(
    authenticator: Authenticator, metadata: dict[str, Any], scope: str, snapshot: Snapshot
) -> ApiKeyEntry | None:
    """The API key of a gRPC call, None without one; raises a ServingError."""
    return authenticator.check(Credentials.in_metadata(metadata), scope, snapshot)
