"""Asks a running server once before it is put under load, so that a run that can measure nothing is not made."""

from __future__ import annotations

import http.client
import json
import urllib.error
import urllib.request

TIMEOUT_S = 10.0


class UnreachableError(Exception):
    """The server cannot be measured; the text says why, in one line."""


def check_server(host: str, model: str, key: str) -> None:
    """Ask the front plane at `host` for its models. Raises UnreachableError unless it serves this one to this key."""
    address = f"{host.rstrip('/')}/v1/models"
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    try:
        with urllib.request.urlopen(urllib.request.Request(address, headers=headers), timeout=TIMEOUT_S) as answer:
            names = [each["id"] for each in json.load(answer)["data"]]
    except urllib.error.HTTPError as error:
        needs_key = "; is LOAD_API_KEY a key of this server?" if error.code in (401, 403) else ""
        raise UnreachableError(f"{address} answers {error.code}{needs_key}") from error
    except (OSError, http.client.HTTPException) as error:
        raise UnreachableError(f"{address} does not answer: {getattr(error, 'reason', error)}") from error
    except (ValueError, KeyError, TypeError) as error:
        raise UnreachableError(f"{address} is no list of models: is --host a front plane's URL?") from error
    if model not in names:
        raise UnreachableError(f"{host} serves no {model} (LOAD_MODEL); it serves {', '.join(names) or 'nothing'}")
