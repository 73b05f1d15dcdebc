"""Where the files of a model or an adapter lie: a path, or a file: URL of this machine. Nothing is downloaded."""

from __future__ import annotations

import re
from urllib.parse import unquote, urlsplit

_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*):")


def path_of(source: str) -> str | None:
    """The path that a client's `src` or `url` means; None for a URL of another kind or host."""
    scheme = _SCHEME.match(source)
    if scheme is None:
        return source
    try:
        parts = urlsplit(source)
    except ValueError:  # its host is none
        return None
    return unquote(parts.path) if scheme[1].lower() == "file" and parts.netloc in ("", "localhost") else None
