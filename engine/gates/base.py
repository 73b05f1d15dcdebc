"""A thing that requests wait for. The scheduler asks a list of gates, and knows none of them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Sequence

    from engine.failures import Failure
    from engine.request import Request


class Gate(Protocol):
    """Requests that it has nothing to do with pass. A gate inherits from this and says what differs."""

    def refusal(self, request: Request) -> Failure | None:
        """Why the request, which has just come, can never pass."""
        return None

    def poll(self, busy: bool) -> None:
        """Take in what has come since the last step; `busy`: sequences run."""
        return

    def failure(self, request: Request) -> Failure | None:
        """Why the request can go no further, once that is known."""
        return None

    def begin(self, running: Sequence[Request]) -> None:
        """A step's admissions begin. `running` grows by each request that starts."""
        return

    def consider(self, request: Request) -> None:
        """It is this request's turn, whatever another gate says to it."""
        return

    def may_start(self, request: Request) -> bool:
        """Whether it may begin to run now; asked after `consider`, and last of all where other gates let it pass."""
        return True

    def may_step(self, request: Request) -> bool:
        """Whether a running request may take part in the next step."""
        return True
