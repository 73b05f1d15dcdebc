"""The outputs of one request from the worker that was chosen for it, or from another if that one does not take it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from engine.client import EngineDead
from engine.failures import FailureCode

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable

    from engine.client import EngineClient
    from engine.messages import RequestOutput
    from inference.workers.routing.placement import Placement

NOT_TAKEN = (FailureCode.DRAINING, FailureCode.OVERLOADED)
"""Answers of a worker that has not begun the request, while another may take it."""
MAX_RETRIES = 2


class RoutedOutputs:
    """An iterator over a request's outputs; close it with `aclose`.

    A request that its worker does not take is submitted to another: at most MAX_RETRIES times, only before the first
    output, and only while the retry budget lasts. A death of the worker after that is the caller's.
    """

    def __init__(
        self,
        placement: Placement,
        submit: Callable[[EngineClient], AsyncGenerator[RequestOutput, None]],
        another: Callable[[set[EngineClient]], Placement | None],
    ) -> None:
        """`submit` sends the request to a worker. `another` places it at a worker that is not in the set, or returns
        None.
        """
        self._placement, self._submit, self._another = placement, submit, another
        self._tried = {placement.client}
        self._outputs = submit(placement.client)
        self._begun = False

    def __aiter__(self) -> RoutedOutputs:
        return self

    async def __anext__(self) -> RequestOutput:
        """The next output; raises EngineDead if the worker is lost."""
        while True:
            refused = self._placement.client.failure is not None and not self._begun
            try:
                output = await anext(self._outputs)
            except EngineDead:
                self._placement.fail()
                if refused and await self._moved():  # it was never sent
                    continue
                raise
            code = None if output.error is None else output.error.code
            if not self._begun and code in NOT_TAKEN and await self._moved():
                continue
            self._begun = True
            self._placement.note(output)
            return output

    async def aclose(self) -> None:
        """End the request; without its last output it is aborted in the engine."""
        if self._begun:  # by a stop string, or its client left: what was produced is its length
            self._placement.end()
        self._placement.leave()
        await self._outputs.aclose()

    async def _moved(self) -> bool:
        """Whether another worker has the request now."""
        placement = self._another(self._tried) if len(self._tried) <= MAX_RETRIES else None
        if placement is None:
            return False
        self._placement.leave()
        await self._outputs.aclose()
        self._placement, self._outputs = placement, self._submit(placement.client)
        self._tried.add(placement.client)
        return True
