"""Quantization methods for the layers' weights: one file each, named like the method. This file lists their names; it
imports none of them, and no torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from engine import registry

NONE = "none"
"""No quantization."""
NAMES = (NONE, *registry.names("quantization"))
if TYPE_CHECKING:
    Name = str
else:
    Name = Literal[NAMES]
