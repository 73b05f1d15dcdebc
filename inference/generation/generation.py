"""A prepared request that runs on the engine: yields deltas until every sequence has ended.

`Generation.deltas` (1) submits the sequences to the workers that the router chooses, and with their tokens so far to
another if one dies or hands them over, (2) decodes token ids and searches for stop strings, (3) yields until every
sequence has ended. (4) Closing it early aborts the sequences, (5) `finally` notifies the observers and logs one line.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import Counter
from contextlib import aclosing
from typing import TYPE_CHECKING

import msgspec
import structlog

from engine.client import EngineDead
from engine.failures import FinishReason
from engine.kv_transfer.handle import new_transfer_id
from engine.messages import RequestOutput
from inference.errors import DeadlineExceeded, GenerationFailed, Overloaded, ServingError
from inference.generation.deltas import Delta, Timings, Usage
from inference.generation.ending import EndCause, Ending
from inference.generation.failures import failure_of, log_failure
from inference.generation.merging import merge
from inference.generation.placement import Interrupted, Placement, Prefilled, ReplayCause, give_up, onward
from inference.generation.sequence_text import SequenceText
from inference.generation.stall import StallWatch
from inference.telemetry import trace_context
from inference.workers.routing.demand import Demand
from inference.workers.routing.outputs import AssignedOutputs
from inference.workers.target import Superseded

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence

    from engine.client import EngineClient
    from engine.kv_transfer.handle import KvSource
    from engine.messages import TokenLogprob
    from engine.sampling.params import SamplingParams
    from inference.generation.caller import Caller
    from inference.generation.requests import GenerationRequest
    from inference.telemetry.base import EmbeddingRun
    from inference.workers.router import EngineRouter
    from inference.workers.routing.assignment import Assignment
    from inference.workers.target import Target

logger = structlog.get_logger(__name__)

SEED_MASK = (1 << 64) - 1
INLINE_ENTRIES = 2000
"""Tokens and top log-probabilities above which a response is encoded in a thread."""


class Observer:
    """Receives the start and end of every generation, and the end of embeddings. Subclasses implement what they need."""

    def started(self, generation: Generation) -> None:
        """The generation is submitted to an engine."""

    def rejected(self, deployment: str) -> None:
        """A request of the deployment was refused because too many are queued."""

    def first_token(self, generation: Generation) -> None:
        """The first token of any of its sequences arrived."""

    def finished(
        self, generation: Generation, finish: FinishReason, token_times: list[float], preemptions: int
    ) -> None:
        """The generation ended: STOP, LENGTH, ERROR, or ABORT when the client disconnected. Times are monotonic seconds."""

    def embedded(self, run: EmbeddingRun) -> None:
        """A request for embeddings ended."""


class Generation:
    """A prepared request: run it once with `deltas`, then read `usage` and `prompt_logprobs`."""

    def __init__(
        self,
        request: GenerationRequest,
        target: Target,
        prompt_token_ids: list[int],
        params: SamplingParams,
        *,
        caller: Caller,
        dialect: str,
        arrived: float,
        router: EngineRouter,
        observers: Sequence[Observer],
        timeout_s: float,
        replay_wait_s: float,
        encode: Callable[[Target], Awaitable[tuple[list[int], SamplingParams]]],
        token_timeout_s: float = 0.0,
    ) -> None:
        """A token that takes longer than `token_timeout_s` after the one before ends the generation; 0: none does. `encode` makes prompt and parameters again, for another version of the model. `arrived` is in monotonic seconds;
        `timeout_s` counts from the start of `deltas`. A sequence whose worker ended waits at most `replay_wait_s` for another.
        """
        self.request, self.target, self.params = request, target, params
        self.prompt_token_ids, self.request_id, self.dialect = prompt_token_ids, caller.request_id, dialect
        # Equal prompts share cached blocks only within one API key.
        self._cache_salt = f"{caller.tenant}:{request.cache_salt}"
        self.tenant, self._standing, self._encode = caller.tenant, caller.standing, encode
        self._demand = self._new_demand()
        self.timings = Timings(arrived)
        self.usage = Usage(prompt_tokens=len(prompt_token_ids))
        self.prompt_logprobs: list[TokenLogprob] = []
        self.sequence_tokens = [0] * request.n
        self.finish_reasons: list[str] = []
        """Of the sequences that have ended, in that order."""
        self.trace = trace_context.current()
        self.cold = False
        """Whether it waited for its deployment's first worker."""
        self._ends_early = False
        """Whether another server goes on."""
        self.replays: Counter[ReplayCause] = Counter()
        """How often a sequence went on at another worker, by cause."""
        self._router, self._observers = router, observers
        self._timeout_s, self._replay_wait_s = timeout_s, replay_wait_s
        self._stall, self._stalled = StallWatch(token_timeout_s, self._end_stalled), False
        self._token_times: list[float] = []
        self._preemptions = 0
        self._unfinished = request.n
        self.finish = FinishReason.ABORT
        self.held: KvSource | None = None
        """Where the prompt's blocks are held, as `GenerationRequest.hold` asked."""
        self.ending = Ending()
        self._cancelled: EndCause | None = None
        self._deadline = math.inf
        self._submitted: list[tuple[EngineClient, int]] = []

    def _new_demand(self) -> Demand:
        return Demand(
            self.prompt_token_ids,
            self.params.max_tokens,
            tenant=self.tenant,
            cache_salt=self._cache_salt,
            adapter="" if self.target.adapter is None else self.target.adapter.digest,
            session=self.request.session,
            reads_cache=self.params.prompt_logprobs is None,
        )

    @property
    def heavy(self) -> bool:
        """Whether the response is large enough to be encoded in a thread."""
        each = 1 + (self.params.logprobs or 0)
        prompt = len(self.prompt_logprobs) * (1 + (self.params.prompt_logprobs or 0))
        return sum(self.sequence_tokens) * each + prompt > INLINE_ENTRIES

    @property
    def batch_size(self) -> int:
        """Sequences in the worker's last step."""
        return max(1, self._submitted[-1][0].stats.running) if self._submitted else 1

    @property
    def ended(self) -> bool:
        """Whether every sequence has ended, even if its last delta is not sent yet."""
        return not self._unfinished

    @property
    def timed_out(self) -> bool:
        """Whether its deadline has passed."""
        return time.monotonic() >= self._deadline

    @property
    def cancelled(self) -> bool:
        """Whether `cancel` was called."""
        return self._cancelled is not None

    def cancel(self, cause: EndCause = EndCause.CANCELLED) -> None:
        """End every sequence now: `deltas` ends as after a stop string. `cause` is for the log."""
        self._cancelled = cause
        self._stop()

    def _end_stalled(self) -> None:
        self._stalled = True
        self._stop()

    def _stop(self) -> None:
        for client, request_id in self._submitted:
            client.stop(request_id)

    async def deltas(self) -> AsyncGenerator[Delta, None]:
        """Yield the deltas of all sequences until they have ended; raises a ServingError on failure."""
        self.timings.submitted = time.monotonic()
        latest = self.timings.submitted + min(self.request.timeout_s or math.inf, self._timeout_s)
        self._deadline = min(latest, self._standing.deadline)
        for observer in self._observers:
            observer.started(self)
        try:
            async with aclosing(self._merged()) as merged:
                async for delta in merged:
                    self._stall.rests()
                    self._note_tokens(delta)
                    yield delta
                    self._stall.waits()
            self.finish = delta.finish_reason or self.finish
        except (GeneratorExit, asyncio.CancelledError):  # no consumer is left
            if not self.ended:
                self.ending.all(self._cancelled or EndCause.CLIENT_LEFT)
            raise
        except ServingError as error:
            self.finish, error.logged = FinishReason.ERROR, True
            if isinstance(error, Overloaded):
                for observer in self._observers:
                    observer.rejected(self.target.entry.name)
            self.ending.all(*log_failure(error))
            raise
        finally:
            self._stall.close()
            self.timings.finished = time.monotonic()
            for observer in self._observers:
                observer.finished(self, self.finish, self._token_times, self._preemptions)
            logger.info("generation", **self._log_fields())

    async def _merged(self) -> AsyncGenerator[Delta, None]:
        """The deltas of all sequences, in order of arrival."""
        async with aclosing(merge([self._sequence(index) for index in range(self.request.n)])) as merged:
            async for _, delta in merged:
                yield delta

    async def _sequence(self, index: int) -> AsyncGenerator[Delta, None]:
        """The deltas of one sequence, wherever it runs."""
        placement = self._placement()
        while True:
            try:
                async with aclosing(self._placed(index, placement)) as deltas:
                    async for delta in deltas:
                        yield delta
                return
            except Superseded as error:
                await self._encode_for(error.target)
                placement.follow(self.target)

    async def _encode_for(self, target: Target) -> None:
        """Prepare the request again, for another version of its model; sequences that have begun keep what they have."""
        if target.version == self.target.version:  # another sequence has done it
            return
        prompt, params = await self._encode(target)
        self.target, self.prompt_token_ids = target, prompt
        self.params = msgspec.structs.replace(params, seed=self.params.seed)
        self.usage.prompt_tokens, self._demand = len(prompt), self._new_demand()

    async def _placed(self, index: int, placement: Placement) -> AsyncGenerator[Delta, None]:
        """The deltas of one sequence; raises Superseded before the first one."""
        params, prompt, demand = self.params, self.prompt_token_ids, self._demand
        if index:
            params = msgspec.structs.replace(params, seed=(params.seed + index) & SEED_MASK, prompt_logprobs=None)
        text, ended = SequenceText(self.request, self.target, prompt, params.min_tokens, index), None
        if self.request.generated:
            yield (delta := text.render(RequestOutput(0, token_ids=self.request.generated), None))
            if delta.finish_reason is not None:
                return
        prefilled = placement.prefilled_elsewhere(self.request.blocks, len(prompt))
        while True:
            begun = bool(text.token_ids)
            assignment = await placement.worker(ended, demand, begun=begun, prefilled=prefilled)
            if assignment is None:
                break
            if index == 0 and not text.token_ids:
                self.prompt_logprobs = []
            awaited, prefilled, hold, later = prefilled, None, "", None
            if assignment.splits and params.max_tokens - len(text.token_ids) > 1:
                hold, begun_with = new_transfer_id(), [*prompt, *text.token_ids]
                if params.prompt_logprobs is None:  # else the prefix cache is not read
                    later = placement.choose_next(assignment, demand, hold, begun_with)
            elif self.request.hold and self.request.n == params.max_tokens - len(text.token_ids) == 1:
                hold = new_transfer_id()
            try:
                source = None if awaited is None else awaited.source
                running = self._outputs(assignment, prompt, params, text.token_ids, source, hold)
                async with aclosing(running) as outputs:
                    async for output in outputs:
                        self.note(index, output)
                        if output.token_ids:
                            awaited = None
                        delta = text.render(output, self._cancelled)
                        if delta.token_ids or delta.finish_reason is not None:
                            yield delta
                        if delta.finish_reason is not None or self._ends_early:
                            return
                raise GenerationFailed("The generation ended early.")
            except Interrupted as error:
                ended = error
            except Prefilled as error:
                ended, prefilled = None, error
                prefilled.later = later
            finally:
                if awaited is not None:
                    awaited.release()
                if hold and prefilled is None and self.held is None:
                    give_up(hold, assignment.client, later)
        yield text.render(RequestOutput(0, finish_reason=FinishReason.ABORT), self._cancelled)

    def _placement(self) -> Placement:
        """The choice of workers for one sequence."""
        return Placement(self.target, self._router, deadline=self._deadline, wait_s=self._replay_wait_s,
                         cancelled=lambda: self.cancelled, replays=self.replays)  # fmt: skip

    async def _outputs(
        self,
        assignment: Assignment,
        token_ids: list[int],
        params: SamplingParams,
        generated: list[int],
        source: KvSource | None = None,
        hold: str = "",
    ) -> AsyncGenerator[RequestOutput, None]:
        """The outputs of a sequence at the assigned worker, after its `generated` tokens; the blocks of its first ones are at
        `source`. Raises Interrupted if it may go on at another worker; Prefilled after its first token, if that should be held.
        """
        client, request_id = assignment.client, assignment.client.next_request_id()
        self._submitted.append((client, request_id))
        outputs = client.generate(
            token_ids,
            params,
            generated=generated,
            request_id=request_id,
            priority=self.request.priority,
            cache_salt=self._cache_salt,
            timeout_s=self._deadline - time.monotonic(),
            adapter=self.target.adapter_ref,
            tenant=self._standing.tenant,
            band=self._standing.band,
            hold=hold,
            source=source,
            age_s=time.monotonic() - self.timings.arrived,
            steps=self.request.steps,
        )
        try:
            async with aclosing(AssignedOutputs(assignment, outputs)) as assigned:
                async for output in assigned:
                    end = onward(client, output)
                    if end is None:
                        self.held = output.source if self.request.hold else None
                        yield output
                        continue
                    if output.token_ids:  # a reader that lags gets its last tokens and the end in one output
                        yield msgspec.structs.replace(output, finish_reason=None, source=None)
                    raise end
        except EngineDead as error:
            raise Interrupted(client, ReplayCause.WORKER_DIED) from error

    def note(self, index: int, output: RequestOutput) -> None:
        """Record usage and timings of an output of sequence `index`; raises its error."""
        if self._stalled:
            raise DeadlineExceeded("The next token did not come in time.")
        failure = failure_of(output, self.request.grammar, cancelled=self.cancelled)
        if failure is not None:
            raise failure
        if output.cached_tokens is not None and index == 0:
            self.usage.cached_tokens = output.cached_tokens
        if output.queue_s is not None:
            self.timings.queue_s = output.queue_s
        if output.prompt_logprobs:
            self.prompt_logprobs += output.prompt_logprobs
        self._preemptions = max(self._preemptions, output.preemptions)

    def _note_tokens(self, delta: Delta) -> None:
        now = time.monotonic()
        if delta.token_ids and not self.timings.first_token:
            self.timings.first_token = now
            for observer in self._observers:
                observer.first_token(self)
        self.timings.last_token = now
        self._token_times.extend([now] * len(delta.token_ids))
        self.usage.completion_tokens += len(delta.token_ids)
        self.sequence_tokens[delta.index] += len(delta.token_ids)
        if delta.finish_reason is not None:
            self._unfinished -= 1
            self.finish_reasons.append(delta.finish_reason.value)
            self.ending.sequence(delta.cause, delta.stop_reason)

    def _log_fields(self) -> dict[str, object]:
        timings = self.timings
        return {
            "request_id": self.request_id,
            "dialect": self.dialect,
            "deployment": self.target.entry.name,
            "model": self.target.entry.model,
            "adapter": None if self.target.adapter is None else self.target.adapter.name,
            "finish": self.finish.value,
            **self.ending.fields,
            "sequences": self.request.n,
            "prompt_tokens": self.usage.prompt_tokens,
            "cached_tokens": self.usage.cached_tokens,
            "completion_tokens": self.usage.completion_tokens,
            "queue_ms": round(timings.queue_s * 1e3, 1),
            "ttft_ms": round((timings.first_token - timings.arrived) * 1e3, 1) if timings.first_token else None,
            "total_ms": round((timings.finished - timings.arrived) * 1e3, 1),
            **({"replays": self.replays.total()} if self.replays else {}),
        }
