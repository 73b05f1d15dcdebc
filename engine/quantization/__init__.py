"""How layers' weights may be kept: a file a method, named by the file. This names them and imports none, nor torch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from engine import registry

NONE = "none"
"""The weights stay as they are."""
NAMES = (NONE, *registry.names("quantization"))
if TYPE_CHECKING:
    Name = str
else:
    Name = Literal[NAMES]
