"""The outputs of one request, as iterators: those of an assignment, and those of whichever worker takes the request."""

from __future__ import annotations

from typing import TYPE_CHECKING

from engine.client import EngineDead
from engine.failures import FailureCode

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable

    from engine.client import EngineClient
    from engine.messages import RequestOutput
    from inference.workers.routing.assignment import Assignment

NOT_TAKEN = (FailureCode.DRAINING, FailureCode.OVERLOADED)
"""Answers of a worker that has not begun the request, while another may take it."""
MAX_RETRIES = 2


class AssignedOutputs:
    """An iterator over the outputs of an assignment, which keeps its account; close it with `aclose`."""

    def __init__(self, assignment: Assignment, outputs: AsyncGenerator[RequestOutput, None]) -> None:
        self.assignment, self._outputs = assignment, outputs
        self.begun = False
        """Whether there was an output."""

    def __aiter__(self) -> AssignedOutputs:
        return self

    async def __anext__(self) -> RequestOutput:
        """The next output; raises EngineDead if the worker is lost."""
        try:
            output = await anext(self._outputs)
        except EngineDead:
            self.assignment.fail()
            raise
        self.begun = True
        self.assignment.note(output)
        return output

    async def aclose(self) -> None:
        """End the request; without its last output it is aborted in the engine."""
        if self.begun:  # by a stop string, or its client left: what was produced is its length
            self.assignment.end()
        self.assignment.leave()
        await self._outputs.aclose()


class RoutedOutputs:
    """An iterator over a request's outputs; close it with `aclose`.

    A request that its worker does not take is submitted to another: at most MAX_RETRIES times, only before the first
    output, and only while the retry budget lasts. A death of the worker after that is the caller's.
    """

    def __init__(
        self,
        assignment: Assignment,
        submit: Callable[[EngineClient], AsyncGenerator[RequestOutput, None]],
        another: Callable[[set[EngineClient]], Assignment | None],
    ) -> None:
        """`submit` sends the request to a worker. `another` assigns it to a worker that is not in the set, or returns
        None.
        """
        self._submit, self._another = submit, another
        self._outputs = AssignedOutputs(assignment, submit(assignment.client))
        self._tried = {assignment.client}

    def __aiter__(self) -> RoutedOutputs:
        return self

    async def __anext__(self) -> RequestOutput:
        """The next output; raises EngineDead if the worker is lost."""
        while True:
            first = not self._outputs.begun
            unreachable = self._outputs.assignment.client.failure is not None
            try:
                output = await anext(self._outputs)
            except EngineDead:
                if first and unreachable and await self._moved():  # it was never sent
                    continue
                raise
            code = None if output.error is None else output.error.code
            if first and code in NOT_TAKEN and await self._moved():
                continue
            return output

    async def aclose(self) -> None:
        """End the request; without its last output it is aborted in the engine."""
        await self._outputs.aclose()

    async def _moved(self) -> bool:
        """Whether another worker has the request now."""
        assignment = self._another(self._tried) if len(self._tried) <= MAX_RETRIES else None
        if assignment is None:
            return False
        await self._outputs.aclose()
        self._outputs = AssignedOutputs(assignment, self._submit(assignment.client))
        self._tried.add(assignment.client)
        return True
