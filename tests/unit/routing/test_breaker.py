"""The circuit breaker of a worker, on a clock of the test."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from inference.workers.routing.breaker import FAILURES, OPEN_S, WINDOW_S, Breaker, BreakerState
from tests.unit.routing.clock import Clock


def opened():
    clock = Clock()
    breaker = Breaker(clock)
    for _ in range(FAILURES):
        breaker.fail(probe=False)
    return breaker, clock


def test_failures_open_it():
    breaker = Breaker(Clock())
    assert [breaker.fail(breaker.begin()) for _ in range(FAILURES)] == [False] * (FAILURES - 1) + [True]
    assert breaker.state is BreakerState.OPEN
    assert not breaker.admits


def test_failures_far_apart_do_not():
    clock = Clock()
    breaker = Breaker(clock)
    for _ in range(3 * FAILURES):
        assert not breaker.fail(breaker.begin())
        clock.pass_s(WINDOW_S / (FAILURES - 1) + 0.1)
    assert breaker.admits


def test_the_last_failure_counts_to_the_end_of_the_window():
    clock = Clock()
    breaker = Breaker(clock)
    for _ in range(FAILURES - 1):
        breaker.fail(probe=False)
    clock.pass_s(WINDOW_S)
    assert breaker.fail(probe=False)


def test_it_is_open_for_its_whole_time_and_half_open_then():
    breaker, clock = opened()
    clock.pass_s(OPEN_S - 0.001)
    assert breaker.state is BreakerState.OPEN
    assert not breaker.begin()
    clock.pass_s(0.001)
    assert breaker.state is BreakerState.HALF_OPEN


def test_a_request_of_before_says_nothing_of_an_open_breaker():
    """It is neither the probe, nor does it open what is open."""
    breaker, clock = opened()
    assert not breaker.fail(probe=False)
    clock.pass_s(OPEN_S)
    probe = breaker.begin()
    assert not breaker.fail(probe=False)
    breaker.forget(probe=False)
    assert not breaker.admits, "the probe still runs"
    assert breaker.fail(probe)


def test_a_probe_that_ends_after_the_breaker_was_tripped_closes_nothing():
    breaker, clock = opened()
    clock.pass_s(OPEN_S)
    probe = breaker.begin()
    breaker.trip()
    breaker.succeed(probe)
    assert breaker.state is BreakerState.OPEN
    assert not breaker.fail(probe)


def test_what_is_closed_sends_no_probe():
    breaker = Breaker(Clock())
    assert not breaker.begin()
    assert breaker.admits


def test_one_probe_closes_it():
    breaker, clock = opened()
    clock.pass_s(OPEN_S)
    assert breaker.state is BreakerState.HALF_OPEN
    assert breaker.admits
    assert breaker.begin()
    assert not breaker.admits
    assert not breaker.begin()
    breaker.succeed(probe=False)  # of an earlier request
    assert not breaker.admits
    breaker.succeed(probe=True)
    assert breaker.state is BreakerState.CLOSED


def test_a_failed_probe_opens_it_again():
    breaker, clock = opened()
    clock.pass_s(OPEN_S)
    assert breaker.fail(breaker.begin())
    assert breaker.state is BreakerState.OPEN
    clock.pass_s(OPEN_S)
    assert breaker.admits


def test_a_probe_without_a_verdict_is_followed_by_another():
    breaker, clock = opened()
    clock.pass_s(OPEN_S)
    breaker.forget(breaker.begin())
    assert breaker.begin()


def test_late_failures_do_not_keep_it_open():
    breaker, clock = opened()
    for _ in range(20):
        breaker.fail(probe=False)
    clock.pass_s(OPEN_S)
    assert breaker.admits


steps = st.lists(st.one_of(st.floats(0, 15), st.sampled_from(["begin", "succeed", "fail", "forget", "trip"])))


@given(steps)
def test_it_admits_again_after_its_time_whatever_happens(taken):
    clock = Clock()
    breaker = Breaker(clock)
    probes = []
    for step in taken:
        if isinstance(step, float):
            clock.pass_s(step)
        elif step == "begin":
            if breaker.admits:
                probes.append(breaker.begin())
        elif step == "trip":
            breaker.trip()
        elif probes:
            getattr(breaker, step)(probes.pop(0))
    while probes:
        breaker.forget(probes.pop())
    clock.pass_s(OPEN_S)
    assert breaker.admits
