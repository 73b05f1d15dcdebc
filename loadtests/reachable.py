"""Asks a running server once before it is put under load, so that a run that can measure nothing is not made."""

from __future__ import annotations

import http.client
import json
import urllib.error
import urllib.request

TIMEOUT_S = 10.0


class UnreachableError(Exception):
    """The server cannot be measured; the text says why, in one line."""


def check_server(host: str, model: str, adapters: tuple[str, ...], key: str) -> None:
    """Ask the front plane at `host` for its models. Raises UnreachableError unless it serves this one, and these adapters, to this key."""
    address = f"{host.rstrip('/')}/v1/models"
    try:
        names = [each["id"] for each in json.loads(_get(address, key))["data"]]
    except (ValueError, KeyError, TypeError) as error:
        raise UnreachableError(f"{address} is no list of models: is --host a front plane's URL?") from error
    if model not in names:
        raise UnreachableError(f"{host} serves no {model} (LOAD_MODEL); it serves {', '.join(names) or 'nothing'}")
    missing = [name for name in adapters if name not in names]
    if missing:
        raise UnreachableError(f"{host} serves no adapters {', '.join(missing)} (LOAD_ADAPTERS)")


def check_metrics(host: str, key: str) -> None:
    """Raises UnreachableError unless the server shows its metrics to this key."""
    _get(f"{host.rstrip('/')}/metrics", key)


def _get(address: str, key: str) -> bytes:
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    try:
        with urllib.request.urlopen(urllib.request.Request(address, headers=headers), timeout=TIMEOUT_S) as answer:
            content: bytes = answer.read()
            return content
    except urllib.error.HTTPError as error:
        needs_key = "; is LOAD_API_KEY a key of this server?" if error.code in (401, 403) else ""
        raise UnreachableError(f"{address} answers {error.code}{needs_key}") from error
    except (OSError, http.client.HTTPException) as error:
        raise UnreachableError(f"{address} does not answer: {getattr(error, 'reason', error)}") from error
