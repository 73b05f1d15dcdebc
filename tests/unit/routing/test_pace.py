"""The pace of workers and which of them is an outlier."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.messages import Stats
from inference.workers.routing.backoff import FIRST_S, LONGEST_S, Backoff
from inference.workers.routing.pace import HISTORY_STEPS, MIN_GAP_S, MIN_STEPS, SLOW_FACTOR, Pace, PaceMeter, outliers
from tests.unit.routing.clock import Clock


class Steps:
    """A worker's reports, step by step."""

    def __init__(self):
        self.meter, self.stats, self.now = PaceMeter(), Stats(), 0.0

    def take(self, count, gap_s, *, prefill=False, running=1, per_report=1):
        for _ in range(count):
            self.now += gap_s * per_report
            self.stats = Stats(
                running=running,
                steps=self.stats.steps + per_report,
                prefill_steps=self.stats.prefill_steps + prefill * per_report,
            )
            self.meter.report(self.stats, self.now)
        return self.meter.pace


def test_the_pace_is_known_after_some_steps():
    worker = Steps()
    assert worker.take(MIN_STEPS, 0.1) == Pace()
    assert worker.take(1, 0.1).recent_s == pytest.approx(0.1)
    assert worker.take(HISTORY_STEPS, 0.1).p90_s == pytest.approx(0.1, rel=0.25)


def test_it_follows_a_change_and_its_history_does_not():
    worker = Steps()
    worker.take(1000, 0.01)
    pace = worker.take(40, 0.1)
    assert pace.recent_s > 0.08
    assert pace.p90_s < 0.02


def test_one_late_step_among_short_ones_is_no_slow_worker():
    worker = Steps()
    worker.take(1000, 0.005)
    assert worker.take(1, 0.3).recent_s < MIN_GAP_S


def test_a_slow_time_is_found_before_it_is_usual():
    slow, other = Steps(), Steps()
    slow.take(1000, 0.005)
    paces = {"slow": slow.meter.pace, "other": other.take(1000, 0.005)}
    for count in range(1, 90):
        paces["slow"] = slow.take(1, 0.3 if count % 3 == 0 else 0.005)
        if outliers(paces, ejected=0):
            break
    assert 10 < count < 60


def test_idle_time_and_prompts_are_left_out():
    worker = Steps()
    worker.take(50, 0.01)
    worker.take(1, 0.01, running=0)
    worker.take(3, 5.0, prefill=True)
    worker.meter.report(worker.stats, worker.now + 3.0)  # a heartbeat
    assert worker.take(50, 0.01).recent_s == pytest.approx(0.01)


def test_steps_that_were_not_reported_here_share_the_time():
    worker = Steps()
    assert worker.take(50, 0.01, per_report=4).recent_s == pytest.approx(0.01)


def test_after_a_reset_it_is_learned_anew():
    worker = Steps()
    worker.take(50, 0.3)
    worker.meter.reset()
    assert worker.meter.pace.recent_s is None
    assert worker.take(MIN_STEPS + 1, 0.01).recent_s == pytest.approx(0.01)


def test_one_slow_worker_of_three_is_found():
    assert outliers({"a": Pace(0.03), "b": Pace(0.3), "c": Pace(0.03)}, ejected=0) == ["b"]
    assert outliers({"a": Pace(0.2), "b": Pace(0.3), "c": Pace(0.2)}, ejected=0) == []


def test_very_fast_workers_are_never_slow():
    assert outliers({"a": Pace(0.001), "b": Pace(0.04), "c": Pace(0.001)}, ejected=0) == []


def test_one_of_two_must_also_be_slow_for_itself():
    fast = Pace(0.03, 0.04)
    assert outliers({"a": fast, "b": Pace(0.3)}, ejected=0) == []
    assert outliers({"a": fast, "b": Pace(0.3, 0.25)}, ejected=0) == []
    assert outliers({"a": fast, "b": Pace(0.3, 0.04)}, ejected=0) == ["b"]


def test_the_last_one_stays():
    assert outliers({"a": Pace(9.0, 0.01)}, ejected=0) == []
    assert outliers({"a": Pace(9.0, 0.01), "b": Pace(0.01, 0.01)}, ejected=1) == []


paces = st.dictionaries(
    st.integers(0, 9), st.builds(Pace, st.none() | st.floats(0.001, 10), st.none() | st.floats(0.001, 10))
)


@given(paces, st.integers(0, 5))
def test_never_more_than_half_and_only_slow_ones(known, ejected):
    found = outliers(known, ejected)
    assert 2 * (len(found) + ejected) <= len(known) + ejected or not found
    assert len(found) < max(1, len(known))
    for key in found:
        others = [p.recent_s for k, p in known.items() if k != key and p.recent_s is not None]
        assert known[key].recent_s >= max(MIN_GAP_S, SLOW_FACTOR * min(others))


def test_pauses_double_until_the_longest():
    clock = Clock()
    backoff = Backoff(clock)
    pauses = []
    for _ in range(7):
        backoff.fail("gone")
        before = clock.now
        while not backoff.over:
            clock.pass_s(0.125)
        pauses.append(clock.now - before)
    assert pauses == [FIRST_S, 0.5, 1.0, 2.0, 4.0, LONGEST_S, LONGEST_S]


def test_a_reason_is_new_once():
    backoff = Backoff(Clock())
    assert [backoff.fail(reason) for reason in ("gone", "gone", "refused", "gone")] == [True, False, True, True]
