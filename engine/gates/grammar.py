"""A request with a grammar waits for the grammar's next token mask."""

from __future__ import annotations

from typing import TYPE_CHECKING

from engine.gates.base import Gate

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from engine.failures import Failure
    from engine.request import Request


class GrammarGate(Gate):
    """Asks the request's matcher."""

    def failures(self, requests: Sequence[Request]) -> Iterable[tuple[Request, Failure]]:
        constrained = [(r, r.matcher.failure) for r in requests if r.matcher is not None]
        return [(request, failure) for request, failure in constrained if failure is not None]

    def may_start(self, request: Request) -> bool:
        return not request.waits_for_grammar

    def pausing(self, running: Sequence[Request]) -> Iterable[Request]:
        return [r for r in running if r.matcher is not None and not r.matcher.ready]
