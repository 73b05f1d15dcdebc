"""How layers' weights may be kept: a file a method, named by the file. "none" leaves them as they are."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, cast

from engine import registry

if TYPE_CHECKING:
    from engine.quantization.base import Quantization

NONE = "none"
NAMES = (NONE, *registry.names("quantization"))
if TYPE_CHECKING:
    Name = str
else:
    Name = Literal[NAMES]


def method(name: str) -> Quantization | None:
    """The method of that name; None for "none". Only this imports a method, and torch with it."""
    return None if name == NONE else cast("Quantization", registry.entry("quantization", name))
