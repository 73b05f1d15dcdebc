"""Settings that may stand in files: DRAGOMAN_<NAME>_FILE in place of DRAGOMAN_<NAME>, as orchestrators mount secrets.

It checks no modes, because orchestrators choose those of what they mount. No error shows a file's content.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from inference.planes.environment import ADDRESS

SUFFIX = "_file"
PREFIX = "DRAGOMAN_"
MAX_BYTES = 64 << 10
LINES = "lines"
"""A file with one value a line; the others have one text."""
KINDS = {"database_url": "text", "secrets_key": "text", "redis_url": "text", "api_keys": LINES}
"""The settings that may stand in files, and what such a file has."""


def with_files(values: dict[str, Any]) -> dict[str, Any]:
    """The values with those that stand in files. Raises ValueError, which names the setting."""
    found = dict(values)
    for name, kind in KINDS.items():
        path = found.get(name + SUFFIX)
        if path is None or str(path) == "":
            found.pop(name + SUFFIX, None)
            continue
        if found.get(name):
            raise ValueError(f"{_shown(name)} and {_shown(name + SUFFIX)} are both set: choose one")
        text = read_secret(Path(path), _shown(name + SUFFIX))
        found[name] = text.split() if kind == LINES else text
    return found


def read_secret(path: Path, setting: str) -> str:
    """The text of a secret's file without spaces around it. Raises ValueError, which names the setting."""
    shown = os.fsencode(path).decode(errors="replace")
    if ADDRESS.match(shown):  # which may have a password
        raise ValueError(f"{setting}: a path is expected, not an address")
    try:
        with path.open("rb") as file:
            data = file.read(MAX_BYTES + 1)
        text = data.decode().strip()
    except OSError as error:
        raise ValueError(f"{setting}: {shown} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ValueError(f"{setting}: {shown} is not UTF-8") from error
    if len(data) > MAX_BYTES:
        raise ValueError(f"{setting}: {shown} has more than {MAX_BYTES} bytes")
    if not text:
        raise ValueError(f"{setting}: {shown} is empty")
    return text


def _shown(name: str) -> str:
    return PREFIX + name.upper()
