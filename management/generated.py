"""Files with a secret that the server makes for itself, once. Imports no Django."""

from __future__ import annotations

import os
import secrets
from contextlib import suppress
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


def generated(path: Path, make: Callable[[], str], mode: int = 0o600) -> str:
    """The text of this file; the first call makes it, whole at once: of several processes one makes it and all read it."""
    with suppress(FileNotFoundError):
        return path.read_text()
    unfinished = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    descriptor = os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with os.fdopen(descriptor, "w") as file:
            file.write(make())
        unfinished.chmod(mode)
        with suppress(FileExistsError):  # another process was earlier
            os.link(unfinished, path)
    finally:
        unfinished.unlink()
    return path.read_text()
