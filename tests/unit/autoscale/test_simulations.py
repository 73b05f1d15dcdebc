"""Random loads, crashes and silent reports: what must hold at every tick whatever happens."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from management.autoscale.config import ScalingConfig, Strategy
from management.autoscale.decision import Outcome, Rule
from management.autoscale.observation import WorkerState
from tests.unit.autoscale.simulation import Load, Simulation, ttft_s

WINDOW_S = 50.0
STRATEGIES = st.sampled_from(list(Strategy))
RATES = st.one_of(st.just(0.0), st.floats(0.01, 12.0), st.sampled_from([0.5, 1.0, 2.0, 4.0, 30.0]))


@dataclass(frozen=True)
class Segment:
    """A time of one rate, and what befalls the deployment at its beginning."""

    seconds: float
    rate: float
    crashes: bool
    reports: bool


SEGMENTS = st.lists(
    st.builds(
        Segment,
        st.sampled_from([5.0, 20.0, 60.0, 120.0, 300.0]),
        RATES,
        st.integers(0, 9).map(lambda roll: roll == 0),
        st.integers(0, 5).map(lambda roll: roll > 0),
    ),
    min_size=1,
    max_size=8,
)


@st.composite
def configs(draw: Callable[..., object]) -> ScalingConfig:
    """Rules with short windows, so that much happens in a short time."""
    minimum = draw(st.integers(0, 3))
    assert isinstance(minimum, int)
    upper = draw(st.sampled_from([0.5, 1.0, 3.0]))
    assert isinstance(upper, float)
    return ScalingConfig(
        min_workers=minimum,
        max_workers=minimum + draw(st.integers(0 if minimum else 1, 6)),  # type: ignore[operator]
        strategy=draw(STRATEGIES),  # type: ignore[arg-type]
        upper=upper,
        lower=upper * draw(st.sampled_from([0.0, 0.2, 0.9])),  # type: ignore[operator]
        up_window_s=draw(st.sampled_from([5.0, 20.0, WINDOW_S])),  # type: ignore[arg-type]
        down_window_s=draw(st.sampled_from([5.0, 20.0, WINDOW_S])),  # type: ignore[arg-type]
        scale_to_zero=minimum == 0 and bool(draw(st.booleans())),
        idle_timeout_s=draw(st.sampled_from([0.0, 30.0, 200.0])),  # type: ignore[arg-type]
        max_price_per_hour=draw(st.sampled_from([None, 3.5])),  # type: ignore[arg-type]
        fast=bool(draw(st.booleans())),
        immediate_scale_down=bool(draw(st.booleans())),
    )


@settings(max_examples=5 * settings.default.max_examples)
@given(configs(), SEGMENTS, st.sampled_from([0.0, 5.0, 30.0, 80.0]), st.sampled_from([1.0, 2.0]))
def test_limits_hold_and_directions_change_slowly(
    config: ScalingConfig, segments: list[Segment], start_up_s: float, price: float
) -> None:
    simulation = Simulation(config, lambda at: 0.0, start_up_s=start_up_s, unit_price=price, processes=2)
    for segment in segments:
        simulation.load, simulation.reports = lambda at, rate=segment.rate: rate, segment.reports
        if segment.crashes and simulation.workers:
            simulation.crash(next(iter(simulation.workers)))
        until = simulation.now + segment.seconds
        while simulation.now < until:
            before = simulation.live
            check(simulation, before, simulation.step())
    changes = [d for d in simulation.decisions if d.rule in (Rule.UP, Rule.DOWN) and d.actions]
    for earlier, later in pairwise(changes):
        window_s = config.up_window_s if later.rule is Rule.UP else config.down_window_s
        assert later.at - earlier.at >= window_s


def check(simulation: Simulation, before: int, outcome: Outcome) -> None:
    """What must hold after every tick."""
    config = simulation.config
    assert simulation.live <= config.max_workers
    if config.max_price_per_hour is not None:
        assert simulation.price <= config.max_price_per_hour
    if not outcome.memory.failed and outcome.scale_blocked is None:
        assert simulation.live >= config.min_workers
    if before and not simulation.live and not outcome.memory.failed:
        assert [decision.rule for decision in outcome.decisions if decision.rule is not Rule.DRAINED] == [Rule.ZERO]
    assert simulation.count(WorkerState.SPARE) <= 1
    assert len(set(simulation.memory.leaving)) == len(simulation.memory.leaving)


@given(st.floats(0.1, 12.0), st.sampled_from([0.5, 1.0, 2.0]), st.sampled_from([5.0, WINDOW_S, 300.0]))
def test_a_rate_converges_from_one_worker(rate: float, upper: float, window_s: float) -> None:
    """Each window doubles, so N workers need log2(N) windows and starts; 3 windows reach 8."""
    config = ScalingConfig(
        strategy=Strategy.RPS, upper=upper, lower=0.1 * upper, up_window_s=window_s, down_window_s=window_s
    )
    ideal = max(1, math.ceil(rate / upper))
    steps = math.ceil(math.log2(ideal))
    check_convergence(config, rate, ideal, steps)


@given(st.floats(0.1, 8.5), st.sampled_from([0.5, 1.0]), st.sampled_from([5.0, WINDOW_S, 300.0]))
def test_latency_converges_from_one_worker(rate: float, upper: float, window_s: float) -> None:
    """Each window adds one worker, so N workers need N - 1 windows and starts."""
    config = ScalingConfig(upper=upper, lower=0.0, up_window_s=window_s, down_window_s=window_s)
    ideal = next(count for count in range(1, 100) if ttft_s(rate, count) <= upper)
    check_convergence(config, rate, ideal, ideal - 1)


def check_convergence(config: ScalingConfig, rate: float, ideal: int, steps: int) -> None:
    """After its steps, and a window more, the deployment has the ideal number of workers, give or take one, and keeps to it.

    The recent window of a low rate may be empty at the decision; the sixth of a window more allows for a later one.
    """
    simulation = Simulation(config, lambda at: rate, asked=1)
    step_s = config.up_window_s + simulation.start_up_s + 4 * config.tick_s
    simulation.run(simulation.start_up_s + (steps + 1) * step_s + config.up_window_s)
    assert abs(simulation.live - ideal) <= 1
    simulation.run(simulation.now + 10 * config.up_window_s)
    assert abs(simulation.live - ideal) <= 1  # a short window holds few arrivals, so one more or fewer is noise


@given(st.integers(2, 8), st.floats(0.0, 0.1))
def test_a_light_load_converges_downwards_one_by_one(workers: int, rate: float) -> None:
    config = ScalingConfig(strategy=Strategy.RPS, up_window_s=WINDOW_S, down_window_s=WINDOW_S)
    simulation = Simulation(config, lambda at: rate, asked=workers)
    simulation.run(35 + (workers - 1) * WINDOW_S + WINDOW_S)
    assert simulation.live == 1


UNUSUAL: dict[str, Load] = {
    "spikes": lambda at: 50.0 if at % 600 < 5 else 0.0,
    "sawtooth": lambda at: 8.0 * (at % 900) / 900,
    "square": lambda at: 6.0 if at % 700 < 350 else 0.5,
    "a request an hour": lambda at: 0.2 if at % 3600 < 5 else 0.0,
    "noise": lambda at: random.Random(int(at)).expovariate(0.5),
    "growth": lambda at: at / 3000,
}


@pytest.mark.parametrize("strategy", list(Strategy))
@pytest.mark.parametrize("load", UNUSUAL.values(), ids=UNUSUAL)
def test_unusual_loads_stay_in_bounds(load: Load, strategy: Strategy) -> None:
    config = ScalingConfig(strategy=strategy, max_workers=8, scale_to_zero=True, upper=3.0)
    simulation = Simulation(config, load)
    for _ in simulation.ticks(4 * 3600):
        assert simulation.live <= 8
    changes = [d for d in simulation.decisions if d.rule in (Rule.UP, Rule.DOWN) and d.actions]
    assert all(later.at - earlier.at >= 300 for earlier, later in pairwise(changes))


def test_a_request_an_hour_wakes_and_sleeps_every_hour() -> None:
    simulation = Simulation(ScalingConfig(scale_to_zero=True), UNUSUAL["a request an hour"]).run(4 * 3600)
    decided = [(decision.at, decision.rule) for decision in simulation.decisions if decision.rule is not Rule.DRAINED]
    assert decided == [
        (start + offset, rule)
        for start in range(0, 4 * 3600, 3600)
        for offset, rule in ((0, Rule.WAKE), (1830, Rule.ZERO))
    ]
