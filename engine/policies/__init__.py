"""Scheduling policies, which order the requests: one file each, named like the policy. This file lists their names and
imports none of them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from engine import registry

DEFAULT = "fair"
NAMES = registry.names("policies")
if TYPE_CHECKING:
    Name = str
else:
    Name = Literal[NAMES]
