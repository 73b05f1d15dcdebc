"""Folders whose files are the entries of a registry: a file is an entry, and its name is the entry's. It imports none of them
to know their names.
"""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from pkgutil import iter_modules
from typing import Any

PROTOCOL = "base"
"""The file that says what an entry must have."""


def names(folder: str) -> tuple[str, ...]:
    """The entries of a folder beside this file, in alphabetical order."""
    found = iter_modules([str(Path(__file__).parent / folder)])
    return tuple(sorted(module.name for module in found if module.name != PROTOCOL))


def entry(folder: str, name: str) -> Any:
    """What the file of that name has as `ENTRY`; raises ModuleNotFoundError for one that there is not."""
    return import_module(f"engine.{folder}.{name}").ENTRY
