"""Where a sequence runs: at one worker, then at another whenever that one dies or hands the sequence over.

A sequence goes on only at workers with the model version that began it. Its tokens so far go with it
(`Submit.generated`), so its text is that of an undisturbed run.
"""

from __future__ import annotations

import asyncio
import time
from enum import StrEnum
from typing import TYPE_CHECKING

from engine.failures import FinishReason
from engine.kv_transfer.handle import KvSource
from engine.kv_transfer.messages import Fetch
from inference.errors import DeadlineExceeded, GenerationFailed, ServingError, ShuttingDown, Unavailable
from inference.generation.failures import refused
from inference.workers.router import NO_WORKER
from inference.workers.routing.outputs import MAX_RETRIES, NOT_TAKEN
from management.snapshot import WorkerRole

if TYPE_CHECKING:
    from collections import Counter
    from collections.abc import Callable

    from engine.client import EngineClient
    from engine.failures import Failure
    from engine.messages import RequestOutput
    from inference.generation.requests import RemoteBlocks
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
    its failure.
    """

    def __init__(self, client: EngineClient, cause: ReplayCause | None, refusal: Failure | None = None) -> None:
        super().__init__()
        self.client, self.cause, self.refusal = client, cause, refusal


class Prefilled(Exception):
    """The worker of `client` has computed the prompt and the first token; another one can fetch the blocks from `source`."""

    def __init__(self, client: EngineClient, source: KvSource) -> None:
        super().__init__()
        self.client, self.source = client, source
        self.later: Assignment | None = None
        """The worker that has been fetching the blocks since they began to be filled."""

    def release(self) -> None:
        """Nobody will fetch the blocks."""
        give_up(self.source.transfer_id, self.client, self.later)


def give_up(transfer_id: str, holder: EngineClient, later: Assignment | None) -> None:
    """Nobody will go on with a sequence: the worker that holds its blocks gives them up, and that of `later` (`choose_next`) what it has
    fetched of them.
    """
    holder.release(transfer_id)
    if later is not None:
        _pass_over(later, transfer_id)


def _pass_over(later: Assignment, transfer_id: str) -> None:
    later.leave()
    # `choose_next` tells it to fetch them by `call_soon`, which may be still to come.
    asyncio.get_running_loop().call_soon(later.client.release, transfer_id)


def onward(client: EngineClient, output: RequestOutput) -> Prefilled | Interrupted | None:
    """What ends a sequence at this worker, with this output, and lets it go on at another one; or None."""
    if output.finish_reason is FinishReason.MOVED and output.source is not None:
        return Prefilled(client, output.source)
    return interruption(client, output)


def interruption(client: EngineClient, output: RequestOutput) -> Interrupted | None:
    """The interruption that ends a sequence with this output, or None."""
    if output.finish_reason is FinishReason.MOVED:
        return Interrupted(client, ReplayCause.MOVED)
    if output.error is not None and output.error.code in NOT_TAKEN:
        return Interrupted(client, None, output.error)
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

    async def worker(
        self, after: Interrupted | None, demand: Demand, *, begun: bool, prefilled: Prefilled | None = None
    ) -> Assignment | None:
        """The worker for the next submission, which must end its assignment; None if the request was cancelled. `after`: what
        ended the last one; `begun`: whether the sequence has tokens; `prefilled`: who has computed them, whose blocks are released if
        there is no worker.

        A worker is waited for; raises DeadlineExceeded, ShuttingDown, Overloaded, or Unavailable (GenerationFailed if it has
        begun) if none comes. Raises Superseded if a sequence without tokens can only go to another model version.
        """
        if prefilled is None:
            return await self._next(after, demand, begun)
        assignment = None
        later, prefilled.later = prefilled.later, None
        if later is not None:
            if later.client.usable and not later.client.suspect and not self._cancelled():
                return later
            _pass_over(later, prefilled.source.transfer_id)
        try:
            assignment = await self._next(after, demand.after_prefill(), begun)
        finally:
            if assignment is None:
                prefilled.release()
        return assignment

    def prefilled_elsewhere(self, blocks: RemoteBlocks | None, num_tokens: int) -> Prefilled | None:
        """What an earlier request left at a worker of this deployment for the `num_tokens` of its prompt; None for any other worker."""
        holder = None if blocks is None else self._target.holder(blocks.worker)
        if blocks is None or holder is None:
            return None
        (worker, client), size = holder, self._target.info.block_size
        source = (worker.address, worker.worker_id, worker.epoch, blocks.transfer_id, num_tokens, size)
        return Prefilled(client, KvSource(*source))

    def choose_next(
        self, first: Assignment, demand: Demand, transfer_id: str, token_ids: list[int]
    ) -> Assignment | None:
        """The worker that will go on after `first`, which must end its assignment; it fetches the blocks of these tokens as they are
        filled. None if there is none yet.
        """
        later = self._router.assign(self._target, demand.after_prefill(), self._kind, self._left)
        if later is None or later.role is WorkerRole.PREFILL:
            if later is not None:
                later.leave()
            return None
        sender, size = first.client, self._target.info.block_size
        source = KvSource(sender.address, sender.worker_id, sender.epoch, transfer_id, len(token_ids), size)
        message = Fetch(source, token_ids, demand.adapter, demand.cache_salt)
        # The sender must know of the transfer first: its request is sent when this task waits.
        asyncio.get_running_loop().call_soon(later.client.fetch, message)
        return later

    async def _next(self, after: Interrupted | None, demand: Demand, begun: bool) -> Assignment | None:
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
        error = None if after.refusal is None else refused(after.refusal)
        if error is not None:
            if len(self._left) > MAX_RETRIES or not self._target.retry(self._left):
                raise error from after
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
