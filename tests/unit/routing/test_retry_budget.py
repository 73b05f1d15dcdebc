"""How many requests may be sent again, on a clock of the test."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from inference.workers.routing.retry_budget import LEAST_PER_S, RATIO, WINDOW_S, RetryBudget
from tests.unit.routing.clock import Clock


def withdrawn(budget):
    count = 0
    while budget.withdraw():
        count += 1
    return count


def test_a_few_are_always_possible():
    clock = Clock()
    budget = RetryBudget(clock)
    assert withdrawn(budget) == LEAST_PER_S * WINDOW_S
    clock.pass_s(WINDOW_S)
    assert withdrawn(budget) == LEAST_PER_S * WINDOW_S


def test_traffic_allows_a_share_of_it():
    budget = RetryBudget(Clock())
    for _ in range(1000):
        budget.note_request()
    assert withdrawn(budget) == LEAST_PER_S * WINDOW_S + 200


@given(st.lists(st.tuples(st.floats(0, 3), st.integers(0, 50), st.integers(0, 50)), max_size=40))
def test_no_window_has_more(steps):
    clock = Clock()
    budget = RetryBudget(clock)
    log = []
    for pause, requests, wanted in steps:
        clock.pass_s(pause)
        for _ in range(requests):
            budget.note_request()
        granted = sum(budget.withdraw() for _ in range(wanted))
        log.append((clock.now, requests, granted))
        if not granted:  # what was granted earlier was measured by the requests of then
            continue
        window = [entry for entry in log if entry[0] > clock.now - WINDOW_S + 1]
        # The oldest second may have begun before the window.
        seen = [entry for entry in log if entry[0] > clock.now - WINDOW_S - 1]
        assert sum(e[2] for e in window) <= RATIO * sum(e[1] for e in seen) + LEAST_PER_S * WINDOW_S
