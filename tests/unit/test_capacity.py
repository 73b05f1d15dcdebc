"""The number of workers for a load: every plan keeps its promises, and none with fewer workers would."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tools.bench.capacity import Load, Rates, apart, arguments_of, joined, plans, table

RATES = Rates("small", 2000.0, {1: 50.0, 8: 240.0, 32: 480.0})
LOADS = st.builds(
    Load, st.floats(0.01, 1000), st.floats(0, 4000), st.floats(1, 2000), st.floats(1, 60, exclude_min=False)
)


def keeps(workers: int, rates: Rates, load: Load, utilization: float) -> bool:
    """Whether so many workers that do both bear the load at some number of streams."""
    each = load.requests_s / workers
    prompts = each * load.prompt_tokens / rates.prompt_tokens_s
    return any(
        prompts + each * load.output_tokens / rate <= utilization * (1 + 1e-9)
        and (1 - prompts) * rate / streams >= load.user_tokens_s * (1 - 1e-9)
        for streams, rate in rates.output_tokens_s.items()
    )


@given(LOADS, st.floats(0.1, 1.0))
def test_as_few_workers_as_bear_the_load(load, utilization):
    plan = joined(RATES, load, utilization)
    if plan is None:
        assert not keeps(10**9, RATES, load, utilization)
        return
    assert plan.busy <= utilization * (1 + 1e-9)
    assert plan.user_tokens_s >= load.user_tokens_s * (1 - 1e-9)
    assert keeps(plan.workers, RATES, load, utilization)
    assert plan.workers == 1 or not keeps(plan.workers - 1, RATES, load, utilization)


@given(LOADS, st.floats(0.1, 1.0))
def test_workers_that_only_prefill_leave_users_their_speed(load, utilization):
    plan = apart(RATES, load, utilization)
    if plan is None:
        assert load.user_tokens_s > 50
        return
    assert plan.user_tokens_s >= load.user_tokens_s
    assert load.requests_s * load.prompt_tokens / RATES.prompt_tokens_s <= utilization * plan.prefill * (1 + 1e-9)
    rate = RATES.output_tokens_s[plan.streams]
    assert load.requests_s * load.output_tokens / rate <= utilization * plan.workers * (1 + 1e-9)


def test_by_hand():
    """10 requests/s of 400 and 96 tokens: 2 s of prompts, 2 s of outputs at 32 streams, in 0.5 s of each worker's second."""
    plan = joined(RATES, Load(10, 400, 96, 1), 0.5)
    assert (plan.workers, plan.streams, plan.busy) == (8, 32, 0.5)
    assert plan.user_tokens_s == pytest.approx(0.75 * 15)
    split = apart(RATES, Load(10, 400, 96, 1), 0.5)
    assert (split.prefill, split.workers, split.user_tokens_s) == (4, 4, 15)


def test_the_cheapest_kind_comes_first():
    large = Rates("large", 20_000.0, {8: 2400.0})
    load = Load(10, 400, 96, 1)
    found = plans([(RATES, 1.0), (large, 2.0)], load, 0.5)
    assert found[0].kind == "large"
    assert [plan.cost_h() for plan in found] == sorted(plan.cost_h() for plan in found)
    lines = list(table(found, load))
    assert len(lines) == 2 + len(found)
    assert "| large |" in lines[2]
    assert plans([(RATES, None)], Load(1, 1, 1, 51), 0.5) == []


@pytest.mark.parametrize(
    "wrong",
    [
        ["--requests", "0"],
        ["--prompt", "0"],
        ["--output", "0"],
        ["--speed", "0"],
        ["--cached", "1.5"],
        ["--utilization", "0"],
        ["--prices", "1", "2"],
    ],
)
def test_what_makes_no_sense_is_refused(wrong, capsys):
    line = ["plan", "--rates", "r.json", "--requests", "1", "--prompt", "9", "--output", "9", *wrong]
    with pytest.raises(SystemExit) as ended:
        arguments_of(line)
    assert ended.value.code == 2
    assert wrong[0] in capsys.readouterr().err
