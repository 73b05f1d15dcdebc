"""Registries made of a folder: each file of the folder is one entry, named like the file. Listing the names imports
none of the files.
"""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from pkgutil import iter_modules
from typing import Any

PROTOCOL = "base"
"""The file that defines the interface of an entry; it is not an entry itself."""


def names(folder: str) -> tuple[str, ...]:
    """The entries of a folder beside this file, in alphabetical order."""
    found = iter_modules([str(Path(__file__).parent / folder)])
    return tuple(sorted(module.name for module in found if module.name != PROTOCOL))


def entry(folder: str, name: str) -> Any:
    """The `ENTRY` of the file of that name; raises ModuleNotFoundError for an unknown name."""
    return import_module(f"engine.{folder}.{name}").ENTRY
