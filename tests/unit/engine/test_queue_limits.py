"""What may wait: so many requests, so many seconds of prompts, and of both no more than a share for one tenant."""

from __future__ import annotations

import time
from itertools import pairwise

import pytest

from engine.block_pool import BlockPool
from engine.config import EngineConfig
from engine.failures import FailureCode, FinishReason
from engine.messages import Tenant
from engine.policies.fair import Fair
from engine.queue_limits import LATE_S, QueueLimits
from engine.request import Request
from engine.sampling.params import SamplingParams
from engine.scheduler import Scheduler
from engine.step_time import StepTime

HEAVY, LIGHT = Tenant("heavy"), Tenant("light")
RATE = 1000.0


def measured() -> StepTime:
    """The times of a machine that computes a thousand prompt tokens a second."""
    times = StepTime()
    for tokens in (256, 512, 64, 512, 128, 512) * 20:
        times.learn(tokens / RATE, 0, [(tokens, 0)])
    return times


def request(number: int, tenant: Tenant = HEAVY, length: int = 100, **fields) -> Request:
    params = SamplingParams(max_tokens=2, ignore_eos=True)
    return Request((1, number), [1] * length, params, arrival=float(number), tenant=tenant, **fields)


def scheduler(step_time: StepTime | None = None, prefix_caching: bool = False, **options) -> Scheduler:
    config = EngineConfig(**{"model": "none", "block_size": 4, "target_ttft_ms": 0, **options})
    return Scheduler(config, BlockPool(50_000, 4, prefix_caching), 100_000, [], Fair(), step_time=step_time)


def codes(made: Scheduler, *requests: Request) -> list[FailureCode | None]:
    return [None if (failure := made.add(each)) is None else failure.code for each in requests]


def dropped(made: Scheduler) -> list[int]:
    return [r.key[1] for r in made.waiting if r.dropped is FinishReason.ERROR]


def test_the_rate_is_that_of_long_steps():
    assert measured().prefill_rate(512, 0) == pytest.approx(RATE, rel=0.1)
    assert StepTime().prefill_rate(512, 0) is None


def test_short_prompts_of_late_make_long_ones_no_slower():
    """What bounds the next step's prompt tokens says nothing about the rate of those that wait."""
    times = StepTime()

    def learn(rows: int, tokens: int) -> None:
        times.learn(0.015 + 0.001 * rows + 0.0003 * tokens, rows, [(tokens, 0)] if tokens else [])

    for rows, tokens in [(8, 0), (1, 0), (0, 64), (0, 128), *[(8, 300)] * 20]:
        learn(rows, tokens)
    running = [request(n) for n in range(8)]
    for each in running:
        each.token_ids.append(5)
        each.num_computed_tokens = 100
    limits = QueueLimits(EngineConfig(model="none"), times)
    before = limits._rate(running)
    for _ in range(100):
        learn(8, 10)
    assert limits._rate(running) == pytest.approx(before, rel=0.2)


def test_prompts_that_take_longer_than_the_target_do_not_wait():
    made = scheduler(measured(), target_ttft_ms=1000)
    assert codes(made, *(request(n) for n in range(1, 9))) == [None] * 8
    failure = made.add(request(9, length=400))
    assert failure is not None
    assert failure.code is FailureCode.OVERLOADED
    assert failure.facts["wait_ms"] == pytest.approx(800, rel=0.1)


@pytest.mark.parametrize("step_time", [None, measured()])
def test_without_a_target_or_a_measurement_only_requests_are_counted(step_time):
    made = scheduler(step_time, target_ttft_ms=0 if step_time else 1000, max_waiting_requests=3)
    assert codes(made, *(request(n, length=5000) for n in range(1, 5))) == [None, None, None, FailureCode.OVERLOADED]


def test_a_prompt_that_is_too_long_for_the_target_is_computed_if_nobody_waits():
    made = scheduler(measured(), target_ttft_ms=1000)
    assert codes(made, request(1, length=5000)) == [None]


def test_one_tenant_holds_half_of_the_queue_while_others_wait():
    made = scheduler(max_waiting_requests=8)
    assert codes(made, request(1, LIGHT)) == [None]
    assert codes(made, *(request(n) for n in range(2, 8))) == [None] * 4 + [FailureCode.OVER_SHARE] * 2


def test_the_same_of_tokens():
    made = scheduler(measured(), target_ttft_ms=1000)
    assert codes(made, request(1, LIGHT)) == [None]
    assert codes(made, *(request(n) for n in range(2, 8))) == [None] * 4 + [FailureCode.OVER_SHARE] * 2


def test_who_has_less_gets_the_place_of_the_newest_of_who_has_most():
    made = scheduler(max_waiting_requests=4)
    assert codes(made, *(request(n) for n in range(1, 5))) == [None] * 4
    assert codes(made, request(5, LIGHT)) == [None]
    assert dropped(made) == [4]
    gone = made.expire(time.monotonic())
    assert [(r.key[1], reason, r.failure.code) for r, reason in gone] == [
        (4, FinishReason.ERROR, FailureCode.OVERLOADED)
    ]
    assert codes(made, request(6, LIGHT)) == [None]
    assert made.expire(time.monotonic())[0][0].failure.code is FailureCode.OVER_SHARE
    assert codes(made, request(7, LIGHT)) == [FailureCode.OVER_SHARE]


def test_greater_bands_take_the_places_of_lower_ones():
    made = scheduler(max_waiting_requests=3)
    assert codes(made, request(1), request(2), request(3, band=-1)) == [None] * 3
    assert codes(made, request(4)) == [None]
    assert dropped(made) == [3]
    assert codes(made, request(5, band=-1)) == [FailureCode.OVERLOADED]


def test_a_weight_makes_a_tenant_lighter():
    made = scheduler(max_waiting_requests=4)
    dear = Tenant("dear", weight=10.0)
    assert (
        codes(made, *(request(n, LIGHT) for n in range(1, 3)), *(request(n, dear) for n in range(3, 5))) == [None] * 4
    )
    assert codes(made, request(5, Tenant("other"))) == [None]
    assert dropped(made) == [2]


def test_a_request_that_cannot_begin_in_time_never_waits():
    made = scheduler(measured())
    now = time.monotonic()
    assert codes(made, *(request(n, length=1000) for n in range(1, 4))) == [None] * 3
    assert codes(made, request(4, deadline=now + 1.0)) == [FailureCode.TOO_LATE]
    assert codes(made, request(5, deadline=now + 60.0)) == [None]
    # It is another tenant's turn before those three.
    assert codes(made, request(6, LIGHT, deadline=now + 1.0)) == [None]


def test_what_does_not_come_before_a_request_does_not_make_it_late():
    made = scheduler(measured(), max_waiting_requests=8)
    now = time.monotonic()
    nightly, people = Tenant("heavy", "nightly"), Tenant("heavy", "people")
    assert codes(made, request(1, LIGHT), *(request(n, nightly, 1000, band=-1) for n in range(2, 6))) == [None] * 5
    assert codes(made, request(6, nightly, deadline=now + 2.0)) == [None]
    assert codes(made, request(7, nightly, band=-1, deadline=now + 2.0)) == [FailureCode.TOO_LATE]
    assert codes(made, request(8, people, deadline=now + 2.0)) == [None]


def test_a_request_that_has_not_begun_at_its_deadline_was_too_late():
    made = scheduler()
    now = time.monotonic()
    made.add(request(1, deadline=now + 5))
    made.add(request(2, deadline=now + 5))
    made.waiting[0].first_scheduled = now
    ended = made.expire(now + 6)
    assert [(r.key[1], reason) for r, reason in ended] == [(1, FinishReason.TIMEOUT), (2, FinishReason.ERROR)]
    assert ended[1][0].failure.code is FailureCode.TOO_LATE


def test_a_queue_that_stays_late_sheds_the_newest_of_the_heaviest_ever_faster():
    limits = QueueLimits(EngineConfig(model="none", target_ttft_ms=1000), StepTime())
    waiting = [request(n) for n in range(100, 140)] + [request(140, LIGHT), request(141, LIGHT)]
    times, now = [], 141.0
    while now < 150.0:
        limits.shed(waiting, [], now)
        if limits.num_shed > len(times):
            times.append(now)
        now += 0.1
    assert times[0] == pytest.approx(141.0 + LATE_S, abs=0.2)
    gaps = [b - a for a, b in pairwise(times)]
    assert gaps[0] > gaps[-1]
    assert [r.key[1] for r in waiting if r.dropped] == list(range(140 - len(times), 140))
    assert {r.failure.code for r in waiting if r.dropped} == {FailureCode.OVER_SHARE}


def test_a_queue_that_is_late_for_a_moment_sheds_nothing():
    limits = QueueLimits(EngineConfig(model="none", target_ttft_ms=1000), StepTime())
    late = [request(1), request(2)]
    for now in (3.0, 4.0):
        limits.shed(late, [], now)
    limits.shed([request(5)], [], 4.5)
    for now in (5.0, 6.5):
        limits.shed(late, [], now)
    assert limits.num_shed == 0


def test_a_tenant_gets_no_more_places_by_other_bands():
    made = scheduler(max_waiting_requests=8)
    assert codes(made, request(1, LIGHT)) == [None]
    assert codes(made, *(request(n, band=n % 3) for n in range(2, 7))) == [None] * 4 + [FailureCode.OVER_SHARE]


def test_who_waits_for_an_adapter_does_not_make_the_queue_late():
    limits = QueueLimits(EngineConfig(model="none", target_ttft_ms=1000), StepTime())
    stopped, now = request(1), 100.0
    stopped.stopped_by_gate = True
    while now < 120.0:
        fresh = [request(2), request(3)]
        for one in fresh:
            one.arrival = now - 0.01
        limits.shed([stopped, *fresh], [], now)
        now += 0.1
    assert limits.num_shed == 0


def test_prompts_leave_a_token_to_each_that_decodes():
    """Whatever order they run in: here those with long prompts have come first."""
    made = scheduler(max_num_batched_tokens=64, max_step_ms=0)
    long, short = [request(n, length=1000) for n in range(1, 4)], [request(n, LIGHT, length=4) for n in (8, 9)]
    for each in short:
        made.add(each)
    batch = made.schedule()
    made.launched(batch)
    made.update(batch, {each: [5] for each in short})
    for each in long:
        made.add(each)
    made.schedule()
    made.running.sort(key=lambda each: each.arrival)
    for _ in range(2):
        batch = made.schedule()
        counts = dict(zip(batch.requests, batch.num_new_tokens, strict=True))
        assert [counts.get(each) for each in short] == [1, 1]
        assert sum(batch.num_new_tokens) == 64


def test_what_is_in_the_prefix_cache_takes_no_time():
    made = scheduler(measured(), prefix_caching=True, target_ttft_ms=1000)
    before = request(0, length=5000)
    assert codes(made, before) == [None]
    (batch,) = [made.schedule()]
    assert batch.requests == [before]
    before.num_computed_tokens = before.num_read_tokens = 512
    made.pool.allocate(before, 5000)
    made.pool.cache(before, 5000)
    assert codes(made, *(request(n, length=4900) for n in range(1, 9))) == [None] * 8
    other = Request((1, 9), [2] * 1200, SamplingParams(max_tokens=2), arrival=9.0, tenant=HEAVY)
    assert codes(made, other) == [FailureCode.OVERLOADED]


@pytest.mark.parametrize(
    ("waiting", "newcomer"),
    [
        ([(LIGHT, 300, 0), (LIGHT, 300, 0), (Tenant("b"), 350, 0)], (HEAVY, 500, 0)),
        ([(LIGHT, 100, 0), (Tenant("b"), 500, 1)], (HEAVY, 900, 1)),
        ([(LIGHT, 50, 0), (LIGHT, 300, 1), (Tenant("b"), 300, 1)], (LIGHT, 300, 1)),
    ],
)
def test_nobody_is_dropped_for_a_request_that_is_refused(waiting, newcomer):
    made = scheduler(measured(), target_ttft_ms=1000)
    numbered = [request(n, tenant, length, band=band) for n, (tenant, length, band) in enumerate(waiting, 1)]
    assert codes(made, *numbered) == [None] * len(waiting)
    tenant, length, band = newcomer
    (refused,) = codes(made, request(9, tenant, length, band=band))
    assert refused in (FailureCode.OVERLOADED, FailureCode.OVER_SHARE)
    assert dropped(made) == []


def test_a_tenants_less_urgent_requests_do_not_make_its_others_late():
    made = scheduler(measured())
    now = time.monotonic()
    assert codes(made, *(request(n, length=1000, priority=5) for n in range(1, 7))) == [None] * 6
    assert codes(made, request(7, deadline=now + 2.0)) == [None]
    assert codes(made, request(8, deadline=now + 2.0, priority=5)) == [FailureCode.TOO_LATE]
