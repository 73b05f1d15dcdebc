"""What decides which request goes first. A policy is a file beside this one with a class as `ENTRY`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol, cast

from engine import registry

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from engine.request import Request


class Policy(Protocol):
    """One scheduler's order. Requests that it never mentions wait; it moves none itself."""

    def insert(self, request: Request, requests: list[Request]) -> None:
        """Put the request where it belongs among those that wait, or among those that run."""
        ...

    def startable(self, waiting: Sequence[Request], running: Sequence[Request]) -> Iterable[Request]:
        """Who of those that wait may start in this step, in the order in which they are tried. The first for whose tokens
        there are not blocks enough ends the step's admissions.
        """
        ...

    def victim(self, running: Sequence[Request]) -> Request:
        """Which one of these, at least one, gives its blocks back when there are none left."""
        ...


def policy(name: str) -> Policy:
    """The policy of that name, for one scheduler."""
    return cast("Policy", registry.entry("policies", name)())
