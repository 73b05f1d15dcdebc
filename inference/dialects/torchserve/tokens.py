"""TorchServe's token authorisation: three keys in `key_file.json`, of which two expire and can be replaced.

A valid API key of this server opens the same calls, if it has the scope.
"""

from __future__ import annotations

import atexit
import hmac
import json
import os
import re
import secrets
import time
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import structlog

from inference.dialects.torchserve.errors import TokenRefused
from inference.errors import Forbidden, Unauthorized
from inference.http.auth import Authenticator

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from management.snapshot import ApiKeyEntry, Snapshot

FILE = "key_file.json"
KEY_BYTES = 24
KINDS = {"manage": "management", "infer": "inference", "token": "API"}
"""The key for each scope."""
_BEARER = re.compile(r"Bearer\s+(\S+)")
logger = structlog.get_logger(__name__)


class KeyFile:
    """The three keys, in memory and in their file, which only its owner can read."""

    def __init__(self, folder: Path, expiration_s: float, clock: Callable[[], float] = time.time) -> None:
        self._path = folder.absolute() / FILE
        self._expiration_s, self._clock = expiration_s, clock
        self._keys: dict[str, str] = {kind: secrets.token_urlsafe(KEY_BYTES) for kind in KINDS.values()}
        self._expires: dict[str, float] = {}

    def create(self) -> None:
        """Write the file, and remove it when the process ends. Raises OSError."""
        now = self._clock()
        self._expires = dict.fromkeys(("management", "inference"), now + self._expiration_s)
        self._write()
        atexit.register(self.remove)
        logger.info("token authorization on", file=str(self._path))

    def remove(self) -> None:
        """Remove the file if it is still this server's."""
        try:
            own = json.loads(self._path.read_bytes())["API"]["key"] == self._keys["API"]
        except (OSError, ValueError, KeyError, TypeError):  # it is gone, or others wrote it
            return
        if own:
            self._path.unlink(missing_ok=True)

    def replace(self, kind: str) -> dict[str, str]:
        """A new key of a kind, management or inference, with its time of expiry. Raises OSError."""
        self._keys[kind] = secrets.token_urlsafe(KEY_BYTES)
        self._expires[kind] = self._clock() + self._expiration_s
        self._write()
        return self._entry(kind)

    def opens(self, kind: str, header: str | None) -> bool:
        """Whether the Authorization header has the key of this kind, which has not expired."""
        found = _BEARER.fullmatch(header or "")
        given = found[1] if found else ""
        same = hmac.compare_digest(given.encode("utf-8", "replace"), self._keys[kind].encode())
        return same and self._clock() < self._expires.get(kind, float("inf"))

    def _entry(self, kind: str) -> dict[str, str]:
        entry = {"key": self._keys[kind]}
        if kind in self._expires:
            moment = datetime.fromtimestamp(self._expires[kind], UTC)
            entry["expiration time"] = moment.isoformat(timespec="microseconds").replace("+00:00", "Z")
        return entry

    def _write(self) -> None:
        text = json.dumps({kind: self._entry(kind) for kind in ("management", "inference", "API")}, indent=2)
        new = self._path.with_name(f"{FILE}.{os.getpid()}")
        new.unlink(missing_ok=True)
        with open(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            file.write(text + "\n")
        new.replace(self._path)


class TokenAuthenticator(Authenticator):
    """Accepts TorchServe's keys, and this server's API keys."""

    def __init__(self, keys: KeyFile) -> None:
        super().__init__(required=True)
        self.keys = keys

    def check(self, header: str | None, scope: str, snapshot: Snapshot) -> ApiKeyEntry | None:
        """None for one of TorchServe's keys. Raises TokenRefused."""
        if scope in KINDS and self.keys.opens(KINDS[scope], header):
            return None
        try:
            return super().check(header, scope, snapshot)
        except (Unauthorized, Forbidden) as error:
            raise TokenRefused from error


def tenant_of(authenticator: Authenticator, metadata: dict[str, Any], scope: str, snapshot: Snapshot) -> str:
    """The tenant of a gRPC call; raises a ServingError."""
    given = metadata.get("authorization")
    key = authenticator.check(None if given is None else str(given), scope, snapshot)
    return key.prefix if key else ""
