"""Decides how many tokens of which requests the next step computes. It moves requests and blocks, and never sees a
tensor.

Prefill and decode are not separate phases: each step moves a request's `num_computed_tokens` towards the number of its
tokens, under one token budget per step (as in vLLM's V1 scheduler). Running requests come first, then waiting ones;
when blocks run out, the policy's victim is preempted: it gives its blocks back and is recomputed later.
"""

from __future__ import annotations

import math
import sys
import time
from collections import Counter
from typing import TYPE_CHECKING

from engine.failures import Failure, FailureCode, FinishReason
from engine.prompt_logits import PromptLogits
from engine.queue_limits import QueueLimits
from engine.request import PENDING, Request, RequestStatus
from engine.scheduled_batch import ScheduledBatch
from engine.speculation.prompt_lookup import PromptLookup, allowance
from engine.step_time import PrefillLimit, StepTime

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from engine.block_pool import BlockPool
    from engine.config import EngineConfig
    from engine.gates.base import Gate
    from engine.policies.base import Policy


class Scheduler:
    """Waiting and running requests, and the rules that move them."""

    def __init__(
        self,
        config: EngineConfig,
        pool: BlockPool,
        max_model_len: int,
        eos_token_ids: Iterable[int],
        policy: Policy,
        gates: Sequence[Gate] = (),
        step_time: StepTime | None = None,
        max_prompt_rows: int = sys.maxsize,
        original_length: int = sys.maxsize,
    ) -> None:
        """`gates` are asked in this order whether a request may start, may go on, or has failed. `step_time` is what
        past steps took. `max_prompt_rows`: the most logits that a step computes for log-probabilities of prompts. A
        sequence that passes the `original_length` is computed again from its beginning.
        """
        self.config, self.pool, self.max_model_len = config, pool, max_model_len
        self._original_length = original_length
        self._step_time = step_time or StepTime()
        self._policy, self._gates, self._max_prompt_rows = policy, gates, max_prompt_rows
        self._limits = QueueLimits(config, self._step_time)
        self.eos_token_ids = frozenset(eos_token_ids)
        self.waiting: list[Request] = []  # both lists are in the policy's order
        self.running: list[Request] = []
        self._short_of_blocks = False
        """Whether a waiting request did not start in the last step because too few blocks were free."""
        self.num_preemptions = self.prefix_queries = self.prefix_hits = 0

    def add(self, request: Request) -> Failure | None:
        """Queue a request. Returns the reason if it is refused: it can never be served, or not now."""
        total = request.num_prompt_tokens + request.params.max_tokens
        if total > self.max_model_len:
            return Failure(FailureCode.TOO_LONG, {"tokens": total, "limit": self.max_model_len})
        if -(-total // self.config.block_size) > self.pool.num_usable:
            return Failure(FailureCode.TOO_LONG_FOR_CACHE, {"tokens": total})
        for gate in self._gates:
            refusal = gate.refusal(request)
            if refusal is not None:
                return refusal
        request.original_length = self._original_length
        request.begin_anew()
        self.pool.extend_hashes(request)
        request.num_reusable_tokens = len(self.pool.match(self.pool.reusable(request))) * self.config.block_size
        # The limits are for new requests; a sequence that goes on here has been admitted once.
        if not request.num_output_tokens:
            refusal = self._limits.refusal(request, self.waiting, self.running, time.monotonic())
            if refusal is not None:
                return refusal
        self._policy.insert(request, self.waiting)
        return None

    @property
    def has_work(self) -> bool:
        """Whether any request is waiting or running."""
        return bool(self.waiting or self.running)

    def expire(self, now: float) -> list[tuple[Request, FinishReason]]:
        """Drop the requests that were aborted or moved, are past their deadline, or failed at a gate; `now` in
        monotonic seconds.
        """
        for gate in self._gates:
            gate.poll(busy=bool(self.running))
        self._limits.shed(self.waiting, self.running, now)
        requests, dropped = [*self.running, *self.waiting], []
        failures: dict[Request, Failure] = {}
        for gate in reversed(self._gates):  # the first gate's reason is told
            failures.update(gate.failures(requests))
        for request in requests:
            reason = request.dropped
            if reason is None and request.deadline is not None and request.deadline <= now:
                reason = FinishReason.TIMEOUT
                if not request.begun:
                    reason, request.failure = FinishReason.ERROR, Failure(FailureCode.TOO_LATE)
            elif reason is None and request in failures:
                reason, request.failure = FinishReason.ERROR, failures[request]
            if reason is not None:
                self.finish(request)
                dropped.append((request, reason))
        return dropped

    def finish(self, request: Request) -> None:
        """Take the request out of the engine and give its blocks back."""
        (self.running if request.status is RequestStatus.RUNNING else self.waiting).remove(request)
        request.status = RequestStatus.FINISHED
        request.leave()
        self.pool.free(request)

    def schedule(self, awaited: bool = False) -> ScheduledBatch:
        """The next step's batch; empty when nothing can run. `awaited`: somebody outside waits for the step's end."""
        may_grow_out = self._original_length < sys.maxsize
        outgrown = [r for r in self.running if r.outgrown and not self._ends(r)] if may_grow_out else []
        unread = any(request.num_pending_tokens for request in outgrown)
        for request in outgrown:
            self._preempt(request)
        self._make_room()
        decoding = sum(request.decodes for request in self.running)
        limit, logits = self._prefill_limit(decoding, awaited), PromptLogits(self._max_prompt_rows)
        batch = ScheduledBatch(bounded=limit.bounded)
        budget, preempted = self._schedule_running(batch, decoding, limit, logits)
        if not preempted and not unread and not limit.exhausted:
            self._admit_waiting(batch, budget, limit, logits)
        for request, count in zip(batch.requests, batch.num_new_tokens, strict=True):
            batch.ends.append(request.num_computed_tokens + count - len(batch.drafts.get(request, ())))
        return batch

    def _make_room(self) -> None:
        """Preempt the running requests that yield to waiting ones, before the step has any of them."""
        most = len(self.running) if self._short_of_blocks else self.config.max_num_seqs
        if not self.waiting or not self.running or len(self.running) < most:
            return
        for gate in self._gates:
            gate.begin(self.running)
        waiting = [request for request in self.waiting if request.is_here]
        for request in self._policy.yields(waiting, [*self.running], most, self._passes):
            self._preempt(request)

    def _passes(self, request: Request) -> bool:
        """Whether all gates let the request start."""
        for gate in self._gates:
            gate.consider(request)
        return all(gate.may_start(request) for gate in self._gates)

    def _prefill_limit(self, decoding: int, awaited: bool) -> PrefillLimit:
        """The time of this step's prompts: what `max_step_ms` leaves beside the sequences that decode, if anybody waits."""
        if not (decoding or awaited) or not self.config.max_step_ms:
            return PrefillLimit(self._step_time, math.inf)
        return PrefillLimit(self._step_time, self._step_time.prompts_s(self.config.max_step_ms, decoding))

    def launched(self, batch: ScheduledBatch, sampled: Iterable[Request] = ()) -> None:
        """Count a launched step's tokens as computed, and append a PENDING token for each request in `sampled`, so that
        the next step can be scheduled before this one ends.
        """
        self._policy.served(batch.requests, batch.num_new_tokens)
        for request, end in zip(batch.requests, batch.ends, strict=True):
            request.num_computed_tokens = end
        for request in sampled:
            request.token_ids.append(PENDING)
            request.num_pending_tokens += 1

    def update(self, batch: ScheduledBatch, sampled: dict[Request, list[int]]) -> dict[Request, FinishReason]:
        """Append the tokens of a launched step. Returns the requests that ended, with their finish reasons.

        Tokens after a request's end are removed from `sampled`, and so are the tokens of requests that were dropped or
        had ended before the tokens were read. For a request with a grammar the end is known only later (`settle`).
        """
        finished = {}
        for request, end in zip(batch.requests, batch.ends, strict=True):
            if request.status is RequestStatus.FINISHED:
                sampled.pop(request, None)
                continue
            tokens, drafts = sampled.get(request, []), batch.drafts.get(request, [])
            reason = None
            for number, token in enumerate(tokens):
                if number:  # an accepted draft token has been computed already
                    end += 1
                    request.num_computed_tokens = end
                self._take(request, end, token)
                if request.matcher is not None:
                    break
                reason = self._stop_reason(request, token, end + 1)
                if reason is not None:
                    del tokens[number + 1 :]
                    break
            if request.status is RequestStatus.RUNNING:  # it may have been preempted while the step ran
                if end // self.config.block_size > request.num_read_tokens // self.config.block_size:
                    self.pool.cache(request, end)
                request.num_read_tokens = end
                if request.hold is not None:
                    request.hold.progress(request)
            if drafts and request.lookup is not None:
                request.lookup.learn(len(drafts), len(tokens) - 1, len(request.token_ids))
            if reason is not None:
                self._end(request, reason)
                finished[request] = reason
        return finished

    def settle(self, requests: Iterable[Request]) -> dict[Request, FinishReason]:
        """The requests that ended with their last token, with their finish reasons. Their grammars must be ready."""
        reasons = {r: self._stop_reason(r, r.token_ids[-1], len(r.token_ids)) for r in requests}
        finished = {request: reason for request, reason in reasons.items() if reason is not None}
        for request, reason in finished.items():
            self._end(request, reason)
        return finished

    def _end(self, request: Request, reason: FinishReason) -> None:
        """Finish a request whose last token has been read, and keep its blocks if it may go on elsewhere."""
        # One that was preempted before its last token was read has no blocks: they are computed again elsewhere.
        running = request.status is RequestStatus.RUNNING
        if request.hold is not None and running and reason is not FinishReason.STOP:
            request.hold.keep(request)
        self.finish(request)

    def _take(self, request: Request, position: int, token: int) -> None:
        """Replace the PENDING token at `position`, or append the token if none is pending."""
        if request.num_pending_tokens:
            request.token_ids[position] = token
            request.num_pending_tokens -= 1
        else:
            request.token_ids.append(token)
        if request.matcher is not None:
            request.matcher.advance(token)

    def _schedule_running(
        self, batch: ScheduledBatch, behind: int, limit: PrefillLimit, logits: PromptLogits
    ) -> tuple[int, bool]:
        """Schedule the next tokens of the running requests, in order; prompts leave a token to each of the `behind` that
        decode. When blocks run out, the policy's victims are preempted. Returns the remaining budget, and whether a
        request was preempted.
        """
        preempted, i, budget = False, 0, self.config.max_num_batched_tokens
        pausing = {request for gate in self._gates for request in gate.pausing(self.running)}
        max_drafts = allowance(len(self.running), self.config.speculative_tokens)
        while i < len(self.running) and budget > 0:
            request = self.running[i]
            decodes = request.decodes
            behind -= decodes
            if request in pausing or self._ends(request):
                i += 1
                continue
            room = budget if decodes else max(budget - behind, 0)
            count = min(len(request.token_ids) - request.num_computed_tokens, room)
            if not decodes:
                count = logits.grant(request, count)
                count = limit.grant(count, request.num_computed_tokens) if count else 0
            if not count:
                i += 1
                continue
            while not self.pool.allocate(request, request.num_computed_tokens + count):
                victim = self._policy.victim(self.running[i:])  # never one that is in the batch already
                preempted = True
                behind -= victim is not request and victim.decodes
                self._preempt(victim)
                if victim is request:
                    break
            else:
                if count == 1 and max_drafts > 0:
                    drafts = self._drafts(request, min(max_drafts, budget - behind - 1))
                    if drafts:
                        batch.drafts[request] = drafts
                        count += len(drafts)
                batch.requests.append(request)
                batch.num_new_tokens.append(count)
                budget -= count
                i += 1
        return budget, preempted

    def _drafts(self, request: Request, limit: int) -> list[int]:
        """Draft tokens for a request in decode; none if the free blocks do not suffice without preemption."""
        params, position = request.params, request.num_computed_tokens
        limit = min(limit, params.max_tokens - request.num_output_tokens - 1, request.room)
        free = params.independent and request.num_output_tokens >= params.min_tokens and not request.num_pending_tokens
        if position != len(request.token_ids) - 1 or limit < 1 or not free:
            return []
        if request.lookup is None:
            request.lookup = PromptLookup()
        drafts = request.lookup.propose(request.token_ids, limit)
        needed = -(-(position + 1 + len(drafts)) // self.config.block_size) - len(request.block_table)
        if needed > self.pool.num_free - len(self.running):
            return []
        return drafts if self.pool.allocate(request, position + 1 + len(drafts)) else []

    def _admit_waiting(self, batch: ScheduledBatch, budget: int, limit: PrefillLimit, logits: PromptLogits) -> None:
        """Admit waiting requests in order while token budget, time, sequences and blocks last.

        A request whose next uncached block is being computed by a running request waits for that block, so that
        requests with one prefix share its prefill. A request that a gate stops does not block later ones.
        """
        self._short_of_blocks = False
        if not self.waiting:
            return
        pending = Counter(digest for request in self.running for digest in self._pending_hashes(request))
        size = self.config.block_size
        for gate in self._gates:
            gate.begin(self.running)
        for request in self._policy.startable([*self.waiting], self.running):
            if budget <= 0 or limit.exhausted or len(self.running) >= self.config.max_num_seqs:
                break
            if not request.is_here or logits.keeps_out(request):
                continue
            request.stopped_by_gate = not self._passes(request)
            if request.stopped_by_gate:
                continue
            reusable = self.pool.reusable(request)
            hit = self.pool.match(reusable)
            if len(hit) < len(reusable) and pending[reusable[len(hit)]] and request.incoming is None:
                continue
            blocks = -(-len(request.token_ids) // size) - len(hit)
            reserve = len(self.running)  # one block each, so that admission is not followed by preemption at once
            if blocks + reserve > self.pool.num_free_after(hit):
                self._short_of_blocks = True
                break
            self.waiting.remove(request)
            self._start(request, hit)
            count = logits.grant(request, min(len(request.token_ids) - request.num_computed_tokens, budget))
            count = limit.grant(count, request.num_computed_tokens)
            if not self.pool.allocate(request, request.num_computed_tokens + count):
                raise RuntimeError("the block pool refused blocks that it had counted as free")
            batch.requests.append(request)
            batch.num_new_tokens.append(count)
            budget -= count
            pending.update(self._pending_hashes(request))

    def _start(self, request: Request, hit: list[int]) -> None:
        self.pool.touch(hit)
        request.block_table = list(hit)
        request.num_computed_tokens = request.num_read_tokens = len(hit) * self.config.block_size
        if request.num_cached_tokens is None:
            request.num_cached_tokens = request.num_computed_tokens
            request.first_scheduled = time.monotonic()
            self.prefix_queries += len(request.token_ids)
            self.prefix_hits += request.num_computed_tokens
        if request.incoming is not None:
            request.incoming.fill(request)
            request.incoming = None
        request.status = RequestStatus.RUNNING
        self._policy.insert(request, self.running)

    def _pending_hashes(self, request: Request) -> list[bytes]:
        """Hashes of the running request's blocks that are not in the prefix cache yet."""
        return request.block_hashes[request.num_read_tokens // self.config.block_size :]

    def _preempt(self, request: Request) -> None:
        """Preempt by recomputation: free the blocks and requeue. Sampled tokens are kept and recomputed with the
        prompt.
        """
        self.running.remove(request)
        if request.hold is not None:
            request.hold.suspend()
        self.pool.free(request)
        request.begin_anew()
        self.pool.extend_hashes(request)
        request.num_preemptions += 1
        self.num_preemptions += 1
        request.status = RequestStatus.WAITING
        self._policy.insert(request, self.waiting)

    def is_stop_token(self, request: Request, token: int) -> bool:
        """Whether the token ends this request's text."""
        ends = token in self.eos_token_ids and not request.params.ignore_eos
        return ends or token in request.stop_token_ids

    def _ends(self, request: Request) -> bool:
        """Whether the request ends with its pending token, which has not been read."""
        full = request.hold is not None or self._is_full(request, len(request.token_ids))
        return full and request.num_pending_tokens > 0

    def _is_full(self, request: Request, length: int) -> bool:
        """Whether the request has reached its `max_tokens`, or the longest sequence, with its first `length` tokens."""
        return length - request.num_prompt_tokens >= request.params.max_tokens or length >= self.max_model_len

    def _stop_reason(self, request: Request, token: int, length: int) -> FinishReason | None:
        """The finish reason if the text ends with `token`, the last of the first `length`; else None. The order is
        vLLM's: end of sequence, stop ids, then length. `min_tokens` is enforced by the sampler.
        """
        if request.matcher is not None and request.matcher.failure is not None:
            return None  # the next step drops it with that error
        if self.is_stop_token(request, token) or (request.matcher is not None and request.matcher.complete):
            return FinishReason.STOP
        if self._is_full(request, length):
            return FinishReason.LENGTH
        return FinishReason.MOVED if request.hold is not None else None
