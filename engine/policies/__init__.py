"""Which request goes first: a file a scheduling policy, named by the file. This names them and imports none."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from engine import registry

DEFAULT = "priority"
NAMES = registry.names("policies")
if TYPE_CHECKING:
    Name = str
else:
    Name = Literal[NAMES]
