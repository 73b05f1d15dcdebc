"""Which request goes first: a file a scheduling policy, named by the file."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, cast

from engine import registry

if TYPE_CHECKING:
    from engine.policies.base import Policy

DEFAULT = "priority"
NAMES = registry.names("policies")
if TYPE_CHECKING:
    Name = str
else:
    Name = Literal[NAMES]


def policy(name: str) -> Policy:
    """The policy of that name, for one scheduler."""
    return cast("Policy", registry.entry("policies", name)())
