"""The interface of a gate: a condition that requests wait for. The scheduler asks a list of gates and knows none of
them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from engine.failures import Failure
    from engine.request import Request


class Gate(Protocol):
    """A base class that lets every request pass; a gate overrides what differs."""

    def refusal(self, request: Request) -> Failure | None:
        """Why a new request can never pass; None if it may."""
        return None

    def poll(self, busy: bool) -> None:
        """Collect results that arrived since the last step; `busy`: whether sequences are running."""
        return

    def failures(self, requests: Sequence[Request]) -> Iterable[tuple[Request, Failure]]:
        """Those of the engine's requests that failed, each with the reason."""
        return ()

    def begin(self, running: Sequence[Request]) -> None:
        """Called before a step's admissions. `running` grows by each request that starts."""
        return

    def consider(self, request: Request) -> None:
        """Called when it is the request's turn, even if another gate stops it."""
        return

    def may_start(self, request: Request) -> bool:
        """Whether the request may start now. Called after `consider`, and only if the gates before this one let it
        pass.
        """
        return True

    def pausing(self, running: Sequence[Request]) -> Iterable[Request]:
        """The running requests that may not be in the next step."""
        return ()
