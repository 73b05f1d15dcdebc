"""The outputs of one request at the worker that it is assigned to."""

from __future__ import annotations

from typing import TYPE_CHECKING

from engine.client import EngineDead
from engine.failures import FailureCode

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

    from engine.messages import RequestOutput
    from inference.workers.routing.assignment import Assignment

NOT_TAKEN = (FailureCode.DRAINING, FailureCode.OVERLOADED, FailureCode.OVER_SHARE)
"""Answers of a worker that has not begun the request, while another may take it."""
MAX_RETRIES = 2
"""Other workers that a request is sent to before its first output."""


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
