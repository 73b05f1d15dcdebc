"""Where a sequence runs: at one worker, then at another whenever that one dies or hands the sequence over.

A sequence goes on only at workers with the model version that began it. Its tokens so far go with it
(`Submit.generated`), so its text is that of an undisturbed run.
"""

from __future__ import annotations

import time
from enum import StrEnum
from typing import TYPE_CHECKING

from engine.failures import FailureCode, FinishReason
from inference.errors import DeadlineExceeded, GenerationFailed, Overloaded, ServingError, ShuttingDown, Unavailable
from inference.workers.router import NO_WORKER
from inference.workers.routing.outputs import MAX_RETRIES, NOT_TAKEN

if TYPE_CHECKING:
    from collections import Counter
    from collections.abc import Callable

    from engine.client import EngineClient
    from engine.messages import RequestOutput
    from inference.workers.router import EngineRouter
    from inference.workers.routing.assignment import Assignment
    from inference.workers.routing.demand import Demand
    from inference.workers.target import Target

MAX_REPLAYS = 3
"""Replays of one sequence because of deaths. A sequence that causes them is refused earlier (`engine.casualties`)."""
SPARE_MOVES = 4
"""Workers that may hand a sequence over, in addition to those that the deployment has."""
LOOK_EVERY_S = 0.25
"""Seconds between two looks while a sequence waits: a silent worker that speaks again is not announced."""


class ReplayCause(StrEnum):
    """Why a sequence went on at another worker."""

    WORKER_DIED = "worker_died"
    MOVED = "moved"
    """The worker handed its sequences over before it stopped."""


class Interrupted(Exception):
    """The sequence may go on at another worker than `client`. `cause` is None if that one did not take it; `refusal` is then
    the code.
    """

    def __init__(
        self, client: EngineClient, cause: ReplayCause | None, refusal: FailureCode = FailureCode.DRAINING
    ) -> None:
        super().__init__()
        self.client, self.cause, self.refusal = client, cause, refusal


def interruption(client: EngineClient, output: RequestOutput) -> Interrupted | None:
    """The interruption that ends a sequence with this output, or None."""
    if output.finish_reason is FinishReason.MOVED:
        return Interrupted(client, ReplayCause.MOVED)
    if output.error is not None and output.error.code in NOT_TAKEN:
        return Interrupted(client, None, output.error.code)
    return None


class Placement:
    """Chooses the workers of one sequence, or of the beams of one search."""

    def __init__(
        self,
        target: Target,
        router: EngineRouter,
        *,
        deadline: float,
        wait_s: float,
        cancelled: Callable[[], bool],
        replays: Counter[ReplayCause],
    ) -> None:
        """`deadline` is in monotonic seconds; after an interruption a worker is waited for at most `wait_s` seconds.
        Replays are counted in `replays`.
        """
        self._target, self._router, self._deadline, self._wait_s = target, router, deadline, wait_s
        target.retries.note_request()
        self._cancelled, self._replays = cancelled, replays
        self._kind: tuple[int, str] | None = None
        self._died: set[EngineClient] = set()
        self._left: set[EngineClient] = set()
        """Workers that did not take it, or handed it over."""

    async def worker(self, after: Interrupted | None, demand: Demand, *, begun: bool) -> Assignment | None:
        """The worker for the next submission, which must end its assignment; None if the request was cancelled. `after`: what
        ended the last one; `begun`: whether the sequence has tokens.

        A worker is waited for; raises DeadlineExceeded, ShuttingDown, Overloaded, or Unavailable (GenerationFailed if it has
        begun) if none comes. Raises Superseded if a sequence without tokens can only go to another model version.
        """
        if self._cancelled():
            return None
        if after is not None:
            self._leave(after, begun)
            self._kind = self._kind if begun else None
        assignment = await self._another(demand, begun)
        if assignment is not None and after is not None and after.cause is not None:
            self._replays[after.cause] += 1
        return assignment

    def follow(self, target: Target) -> None:
        """The sequence was prepared again, for this target."""
        self._target = target

    def _leave(self, after: Interrupted, begun: bool) -> None:
        """Record an interruption; raises the error of a sequence that may not go on."""
        (self._died if after.cause is ReplayCause.WORKER_DIED else self._left).add(after.client)
        if len(self._died) > MAX_REPLAYS or len(self._left) > len(self._target.clients) + SPARE_MOVES:
            raise GenerationFailed("The worker that served this request died.", worker_lost=True) from after
        if after.cause is not None or begun:
            return
        if after.refusal is FailureCode.OVERLOADED:
            if len(self._left) > MAX_RETRIES or not self._target.retry(self._left):
                raise Overloaded("Model is overloaded") from after
        elif not self._target.others(self._left) and not self._may_wait:
            raise ShuttingDown("The server is shutting down.") from after

    @property
    def _may_wait(self) -> bool:
        return bool(self._wait_s or self._router.hold_s) and self._router.expects(self._target)

    async def _another(self, demand: Demand, begun: bool) -> Assignment | None:
        # Before its first token a request waits as one that is held: the deployment may have gone to sleep under it.
        give_up = time.monotonic() + (self._wait_s if begun else max(self._wait_s, self._router.hold_s))
        while not self._cancelled():
            if self._router.stopping:
                raise ShuttingDown("The server is shutting down.")
            assignment = self._router.assign(self._target, demand, self._kind, self._left)
            if assignment is not None:
                self._kind = self._kind or assignment.kind
                return assignment
            now = time.monotonic()
            if now >= self._deadline:
                raise DeadlineExceeded("The request ran into its deadline.")
            if now >= give_up or self._router.has_failed(self._target):
                raise _lost(begun)
            await self._router.arrival(min(LOOK_EVERY_S, self._deadline - now, give_up - now))
        return None


def _lost(begun: bool) -> ServingError:
    """The error of a sequence for which no worker came."""
    if begun:
        return GenerationFailed("The worker that served this request died.", worker_lost=True)
    return Unavailable(NO_WORKER)
