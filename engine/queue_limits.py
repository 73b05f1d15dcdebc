"""What may wait for the scheduler: how many requests, how many prompt tokens, and how much of both one tenant holds.

The second limit is a time: prompts that take longer to compute than `target_ttft_ms`, at the rate of long steps that was measured,
would begin late in any case, so they are refused at once, when another worker may still take them. A tenant holds at most half of the
queue while others wait. When the queue is full, a tenant with less gets the place of the newest request of the one with most; a
request of a greater band that of any one of a lower band, also within a tenant's half. A queue whose oldest request waits longer than the target for
LATE_S sheds requests in the same order, ever faster until it is short again (K. Nichols, V. Jacobson, Controlling Queue Delay).

It marks requests; the scheduler drops them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from engine.failures import Failure, FailureCode, FinishReason

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from engine.adapters.failures import Facts
    from engine.config import EngineConfig
    from engine.messages import Tenant
    from engine.request import Request
    from engine.step_time import StepTime

    Holder = tuple[str, str]

LATE_S = 2.0
LOOK_EVERY_S = 0.1
SHARE = 0.5
"""Of the queue, for one tenant while others wait."""


@dataclass(frozen=True, slots=True)
class _Queue:
    """The waiting requests that have not been dropped, in the policy's order."""

    requests: list[Request]

    @property
    def num_tokens(self) -> int:
        return sum(map(_tokens, self.requests))

    def of(self, holder: Holder) -> _Queue:
        return _Queue([request for request in self.requests if request.tenant.holder == holder])

    @property
    def holders(self) -> set[Holder]:
        return {request.tenant.holder for request in self.requests}

    @property
    def heaviest(self) -> Holder:
        """The tenant with the most tokens for its weight, then with the most requests."""
        held: dict[Holder, tuple[float, int]] = {}
        for request in self.requests:
            tokens, count = held.get(request.tenant.holder, (0.0, 0))
            held[request.tenant.holder] = tokens + _tokens(request) / request.tenant.weight, count + 1
        return max(held, key=lambda holder: held[holder])


def _tokens(request: Request) -> int:
    """Those that are to be computed before it generates; the last one always is."""
    return max(1, len(request.token_ids) - max(request.num_computed_tokens, request.num_reusable_tokens))


def _live(waiting: Iterable[Request]) -> _Queue:
    return _Queue([request for request in waiting if request.dropped is None])


class QueueLimits:
    """The limits of one scheduler's queue."""

    def __init__(self, config: EngineConfig, step_time: StepTime) -> None:
        self._config, self._step_time = config, step_time
        self._target_s = config.target_ttft_ms / 1e3
        self._next_look = self._next_drop = 0.0
        self._late_since: float | None = None
        self._dropped = 0
        self.num_shed = 0

    def refusal(
        self, request: Request, waiting: Sequence[Request], running: Sequence[Request], now: float
    ) -> Failure | None:
        """Why a new request may not wait, or None. Others may be dropped to make room for it."""
        if not waiting:
            return None
        queue, rate, new = _live(waiting), self._rate(running), _tokens(request)
        own = queue.of(request.tenant.holder)
        others = len(queue.requests) - len(own.requests)
        flows: dict[Tenant, int] = {}
        for other in queue.requests:
            later = other.tenant == request.tenant and other.priority > request.priority
            if other.band >= request.band and not later:  # the rest does not come before it
                flows[other.tenant] = flows.get(other.tenant, 0) + _tokens(other)
        facts = _facts(queue.num_tokens, rate)
        if request.deadline is not None and rate is not None:
            # No other flow is served more than this one before its own turn comes.
            ahead = min(sum(flows.values()), flows.get(request.tenant, 0) * len(flows))
            if now + ahead / rate > request.deadline:
                return Failure(FailureCode.TOO_LATE, facts)
        most = self._config.max_waiting_requests
        most_tokens = self._target_s * rate if self._target_s and rate is not None else math.inf
        victims: list[tuple[Request, Failure]] = []
        while others and (
            len(own.requests) + 1 > max(1, int(most * SHARE))
            or (own.requests and own.num_tokens + new > most_tokens * SHARE)
        ):
            lower = _Queue([other for other in _fresh(own) if other.band < request.band])
            if not lower.requests:
                return Failure(FailureCode.OVER_SHARE, facts)
            victims.append(_take_out(_newest(_lowest(lower)), queue, facts))
            own = queue.of(request.tenant.holder)
        while queue.requests and not (len(queue.requests) < most and queue.num_tokens + new <= most_tokens):
            victim = self._victim(queue, request, own.num_tokens + new)
            if victim is None:
                return Failure(FailureCode.OVERLOADED, facts)
            victims.append(_take_out(victim, queue, facts))
        for victim, failure in victims:  # only now that the new one fits
            self._drop(victim, failure)
        return None

    def shed(self, waiting: Sequence[Request], running: Sequence[Request], now: float) -> None:
        """Drop a request if the queue has been late for long enough, and leave at least one."""
        if not self._target_s or now < self._next_look:
            return
        self._next_look = now + LOOK_EVERY_S
        queue = _live(waiting)
        arrivals = [request.arrival for request in _fresh(queue) if not request.stopped_by_gate]
        if len(arrivals) < 2 or now - min(arrivals) <= self._target_s:
            self._late_since, self._dropped = None, 0
            return
        if self._late_since is None:
            self._late_since, self._next_drop = now, now + LATE_S
        if now < self._next_drop:
            return
        rate = self._rate(running)
        candidates = _lowest(_Queue(_fresh(queue)))
        if candidates.requests:
            facts = _facts(queue.num_tokens, rate)
            self._drop(*_take_out(_newest(candidates.of(candidates.heaviest)), queue, facts))
        self._dropped += 1
        self._next_drop = now + LATE_S / math.sqrt(self._dropped)

    def _victim(self, queue: _Queue, request: Request, own_tokens: int) -> Request | None:
        """The waiting request that should give its place to this one; None if none should."""
        candidates = _lowest(_Queue(_fresh(queue)))
        if not candidates.requests:
            return None
        lowest, holder = candidates.requests[0].band, candidates.heaviest
        theirs = candidates.of(holder)
        if lowest < request.band:
            return _newest(theirs)
        lighter = own_tokens / request.tenant.weight < theirs.num_tokens / theirs.requests[0].tenant.weight
        if lowest > request.band or holder == request.tenant.holder or not lighter:
            return None
        return _newest(theirs)

    def _drop(self, victim: Request, failure: Failure) -> None:
        victim.dropped, victim.failure = FinishReason.ERROR, failure
        self.num_shed += 1

    def _rate(self, running: Sequence[Request]) -> float | None:
        """Prompt tokens a second in full steps beside what decodes now; None while it is not known."""
        config, times = self._config, self._step_time
        decoding = sum(request.decodes for request in running)
        count = config.max_num_batched_tokens - decoding
        if decoding and config.max_step_ms:
            count = int(min(count, times.taking(times.prompts_s(config.max_step_ms, decoding), 0)))
        return times.prefill_rate(count, decoding)


def _take_out(victim: Request, queue: _Queue, facts: Facts) -> tuple[Request, Failure]:
    """Take the request out of the queue; why it is dropped, if it is."""
    code = FailureCode.OVER_SHARE if len(queue.holders) > 1 else FailureCode.OVERLOADED
    queue.requests.remove(victim)
    return victim, Failure(code, {**facts})


def _facts(tokens: int, rate: float | None) -> Facts:
    return {} if rate is None else {"wait_ms": round(1e3 * tokens / rate)}


def _fresh(queue: _Queue) -> list[Request]:
    """Those that no worker has begun."""
    return [request for request in queue.requests if not request.begun]


def _lowest(queue: _Queue) -> _Queue:
    """Those of the lowest band."""
    lowest = min((request.band for request in queue.requests), default=0)
    return _Queue([request for request in queue.requests if request.band == lowest])


def _newest(queue: _Queue) -> Request:
    return max(queue.requests, key=lambda request: (request.priority, request.arrival))
