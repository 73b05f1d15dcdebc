"""Where a sequence runs: at one worker, then at another whenever that one dies or hands the sequence over.

A sequence goes on only at workers with the model version that began it. Its tokens so far go with it
(`Submit.generated`), so its text is that of an undisturbed run.
"""

from __future__ import annotations

import time
from enum import StrEnum
from typing import TYPE_CHECKING

from engine.failures import FailureCode, FinishReason
from inference.errors import DeadlineExceeded, GenerationFailed, ServingError, ShuttingDown, Unavailable

if TYPE_CHECKING:
    from collections import Counter
    from collections.abc import Callable

    from engine.client import EngineClient
    from engine.messages import RequestOutput
    from inference.workers.router import EngineRouter, Target

MAX_REPLAYS = 2
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
    """The sequence may go on at another worker than `client`. `cause` is None if that one drains and refused it."""

    def __init__(self, client: EngineClient, cause: ReplayCause | None) -> None:
        super().__init__()
        self.client, self.cause = client, cause


def interruption(client: EngineClient, output: RequestOutput) -> Interrupted | None:
    """The interruption that ends a sequence with this output, or None."""
    if output.finish_reason is FinishReason.MOVED:
        return Interrupted(client, ReplayCause.MOVED)
    if output.error is not None and output.error.code is FailureCode.DRAINING:
        return Interrupted(client, None)
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
        self._cancelled, self._replays = cancelled, replays
        self._version: int | None = None
        self._died: set[EngineClient] = set()
        self._left: set[EngineClient] = set()
        """Workers that drain."""

    async def worker(self, after: Interrupted | None, *, begun: bool) -> EngineClient | None:
        """The worker for the next submission; None if the request was cancelled. `after`: what ended the last one;
        `begun`: whether the sequence has tokens.

        The first worker is there at once, or Unavailable is raised. Another one is waited for; raises DeadlineExceeded,
        ShuttingDown, or Unavailable (GenerationFailed if it has begun) if none comes.
        """
        if self._cancelled():
            return None
        if self._version is None:
            first = self._target.pick()
            self._version = self._target.version_of(first)
            return first
        if after is not None:
            self._leave(after, self._version, begun)
        client = await self._another(self._version, begun)
        if client is not None and after is not None and after.cause is not None:
            self._replays[after.cause] += 1
        return client

    def _leave(self, after: Interrupted, version: int, begun: bool) -> None:
        """Record an interruption; raises the error of a sequence that may not go on."""
        (self._died if after.cause is ReplayCause.WORKER_DIED else self._left).add(after.client)
        if len(self._died) > MAX_REPLAYS or len(self._left) > len(self._target.clients) + SPARE_MOVES:
            raise GenerationFailed("The worker that served this request died.", worker_lost=True) from after
        if after.cause is None and not begun and self._router.available(self._target, version) is None:
            raise ShuttingDown("The server is shutting down.") from after

    async def _another(self, version: int, begun: bool) -> EngineClient | None:
        give_up = time.monotonic() + self._wait_s
        while not self._cancelled():
            if self._router.stopping:
                raise ShuttingDown("The server is shutting down.")
            client = self._router.available(self._target, version)
            if client is not None:
                return client
            now = time.monotonic()
            if now >= self._deadline:
                raise DeadlineExceeded("The request ran into its deadline.")
            if now >= give_up:
                raise _lost(begun)
            await self._router.arrival(min(LOOK_EVERY_S, self._deadline - now, give_up - now))
        return None


def _lost(begun: bool) -> ServingError:
    """The error of a sequence for which no worker came."""
    if begun:
        return GenerationFailed("The worker that served this request died.", worker_lost=True)
    return Unavailable("The model is not available at the moment; its workers are starting or restarting.")
