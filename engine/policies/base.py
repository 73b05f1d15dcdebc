"""The interface of a scheduling policy. A policy is a file in this folder with a class as `ENTRY`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol, cast

from engine import registry

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from engine.request import Request


class Policy(Protocol):
    """The order of one scheduler's requests. It decides only; the scheduler moves the requests."""

    def insert(self, request: Request, requests: list[Request]) -> None:
        """Insert the request at its position into `requests`, the waiting or the running ones."""
        ...

    def startable(self, waiting: Sequence[Request], running: Sequence[Request]) -> Iterable[Request]:
        """The waiting requests that may start in this step, in the order of admission; others stay waiting. The first
        one for which too few blocks are free ends the step's admissions. Requests are started while the result is read.
        """
        ...

    def served(self, requests: Sequence[Request], num_tokens: Sequence[int]) -> None:
        """A step is launched with so many tokens of each of these requests; their progress does not include them yet."""
        ...

    def yields(
        self,
        waiting: Sequence[Request],
        running: Sequence[Request],
        max_running: int,
        able: Callable[[Request], bool],
    ) -> list[Request]:
        """The running requests to preempt before a step, so that waiting ones start in their places; `max_running` may
        run at once. `able`: whether nothing but a place keeps a waiting request from starting.
        """
        ...

    def victim(self, running: Sequence[Request]) -> Request:
        """The request of `running` (not empty) to preempt when no blocks are left."""
        ...


def policy(name: str) -> Policy:
    """A new instance of the policy of that name, for one scheduler."""
    return cast("Policy", registry.entry("policies", name)())
