"""Figures are what their names say, also where nothing was measured."""

from __future__ import annotations

import pytest

from loadtests.figures import percentile, stage_figures, user_speed
from loadtests.measured import Measured, knee
from loadtests.plan import PROFILES
from loadtests.samples import Outcome
from loadtests.shapes import SHAPES
from tests.loadtests.runs import ramp, sample, window


@pytest.mark.parametrize(
    ("values", "share", "expected"),
    [
        ([], 0.5, None),
        ([3.0], 0.0, 3.0),
        ([3.0], 1.0, 3.0),
        ([4, 1, 3, 2], 0.5, 2),
        (range(1, 101), 0.95, 95),
        (range(1, 101), 0.07, 7),
        (range(1, 21), 0.95, 19),
    ],
)
def test_percentiles_are_values_that_were_there(values, share, expected):
    assert percentile(list(values), share) == expected


def test_tokens_of_a_stream_count_when_they_came():
    stream = sample(1.0, total_ms=1000, ttft_ms=100, tokens=10)
    assert stream.tokens_between(stream.at_s, stream.end_s + 1) == 10
    assert stream.tokens_between(stream.at_s, stream.at_s + 0.09) == 0
    assert stream.tokens_between(stream.at_s, stream.at_s + 0.55) == 5
    assert stream.tokens_between(stream.at_s, stream.at_s + 0.55) + stream.tokens_between(
        stream.at_s + 0.55, stream.end_s + 1
    ) == pytest.approx(10)


def test_tokens_of_a_whole_answer_are_spread_over_its_time():
    whole = sample(0.0, total_ms=1000, ttft_ms=None, tokens=10)
    assert whole.tokens_between(whole.at_s + 0.25, whole.at_s + 0.75) == pytest.approx(5)
    assert whole.tokens_between(whole.end_s, whole.end_s + 9) == 0


def test_figures_of_a_stage():
    samples = [
        sample(0, total_ms=1000, ttft_ms=100, tokens=10),
        sample(1, total_ms=1100, ttft_ms=200, tokens=9),
        sample(1.5, outcome=Outcome.WRONG, tokens=99),
        sample(9, total_ms=500, tokens=5),
    ]
    figures = stage_figures(samples, window("x", 0, 2))
    assert (figures.requests, figures.outcomes) == (3, {"ok": 2, "wrong": 1})
    assert figures.tokens_per_s == pytest.approx((10 + 8) / 2), "the last token of the second came later"
    assert figures.answers_per_s == pytest.approx(1 / 2)
    assert (figures.ttft_p50_ms, figures.ttft_p95_ms) == (150, 200)
    assert figures.by_user == {"OpenAICompletionStreamUser": {"ok": 2, "wrong": 1}}


def test_the_speed_of_a_user_is_that_after_the_first_token():
    assert user_speed(sample(0, total_ms=1000, ttft_ms=100, tokens=10)) == pytest.approx(10)
    assert user_speed(sample(0, ttft_ms=None)) is None


def test_the_knee_is_where_more_users_give_no_more_tokens():
    record = ramp()
    assert [stage.users for stage in record.curve] == [1, 2, 4, 8]
    assert record.knee_users == 4
    assert knee([]) is None


def test_ratios_are_to_the_same_run():
    share = ramp().figures["throughput_share"]
    assert share == pytest.approx(8 * 10 / 2 / 400, rel=0.05)
    slow = ramp(slow=2).figures
    assert slow["throughput_share"] < 0.6 * share
    assert slow["ttft_p95_multiple"] == pytest.approx(2 * ramp().figures["ttft_p95_multiple"])


def overloaded(*after):
    plan = SHAPES["overload"].plan(PROFILES["cpu-small"])
    windows = [window("alone", 0, 5), window("full", 5, 10), window("overload", 10, 20), window("after", 20, 30)]
    calm = [sample(i / 10) for i in range(40)]
    full = [sample(5 + i / 10, tokens=20) for i in range(50)]
    flood = [sample(10 + i / 10, tokens=19) for i in range(100)]
    told = {"outcome": Outcome.REFUSED, "ttft_ms": None, "tokens": 0, "told_when": True}
    refused = [sample(10 + i / 10 + 0.01, total_ms=30, **told) for i in range(100)]
    samples = sorted([*calm, *full, *flood, *refused, *after], key=lambda each: each.at_s)
    return SHAPES["overload"].measure(Measured(plan, samples, windows))


def test_an_overload_that_is_met():
    figures = overloaded(*[sample(20.5 + i) for i in range(9)])
    assert figures["goodput_share"] == pytest.approx(0.95, abs=0.02)
    assert figures["refusal_p95_ms"] == 30
    assert figures["refusal_p95_multiple"] == 3
    assert figures["untold_refusals"] == 0
    assert figures["recovery_s"] == pytest.approx(0.5)
    assert figures["failures"] == 0, "refusals are none here"


def test_a_load_generator_that_falls_behind_is_seen():
    plan = SHAPES["open"].plan(PROFILES["cpu-small"])
    windows = [window("alone", 0, 10), window("full", 10, 20, 16)]
    samples = [sample(10 + i / 10, total_ms=50) for i in range(100)]  # ten answers a second
    begin = 20.0
    for stage, sent in (("arrivals-25", 25), ("arrivals-50", 50), ("arrivals-80", 20)):
        windows.append(window(stage, begin, begin + 10, 4))
        samples += [sample(begin + 0.05 + i / 10, total_ms=5000) for i in range(sent)]  # whatever becomes of them
        begin += 10
    figures = SHAPES["open"].measure(Measured(plan, samples, windows))
    assert figures["arrivals_share"] == pytest.approx(95 / 155)


def test_recovery_is_after_the_last_bad_answer():
    late = {"ttft_ms": 90, "total_ms": 200}
    figures = overloaded(sample(20.5), sample(21, **late), sample(24, outcome=Outcome.REFUSED), sample(25), sample(26))
    assert figures["recovery_s"] == pytest.approx(5)


def test_a_server_that_does_not_recover_has_no_time_for_it():
    assert overloaded(sample(21), sample(29, outcome=Outcome.LOST))["recovery_s"] is None
    assert overloaded()["recovery_s"] is None


@pytest.mark.parametrize("name", SHAPES)
def test_each_shape_measures_what_it_says_and_passes_nothing_that_was_not_measured(name):
    shape = SHAPES[name]
    for profile in PROFILES.values():
        plan = shape.plan(profile)
        figures = shape.measure(Measured(plan, [], []))
        assert set(figures) == set(shape.figures)
        assert figures["failures"]
        begun = [window(stage.name, i, i + 1) for i, stage in enumerate(plan.stages)]
        assert set(shape.measure(Measured(plan, [], begun))) == set(shape.figures)
