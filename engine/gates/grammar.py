"""A request with a grammar waits for the grammar's next token mask."""

from __future__ import annotations

from typing import TYPE_CHECKING

from engine.gates.base import Gate

if TYPE_CHECKING:
    from engine.failures import Failure
    from engine.request import Request


class GrammarGate(Gate):
    """Asks the request's matcher."""

    def failure(self, request: Request) -> Failure | None:
        return None if request.matcher is None else request.matcher.failure

    def may_start(self, request: Request) -> bool:
        return not request.waits_for_grammar

    def may_step(self, request: Request) -> bool:
        return not request.waits_for_grammar
