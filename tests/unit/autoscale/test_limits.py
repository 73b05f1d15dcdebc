"""Prices, cost, spares and who is removed."""

from __future__ import annotations

import pytest

from management.autoscale.config import Fault, InvalidScaling, ScalingConfig, Strategy
from management.autoscale.cost import cost, current_price
from management.autoscale.decision import DeploymentState, Drain, Kill, Prepare, Promote, Rule, Start
from management.autoscale.fleet import Fleet
from management.autoscale.limits import Cap, cap_of
from management.autoscale.memory import Limit, Memory, ServedRate
from management.autoscale.observation import Observation
from tests.unit.autoscale.helpers import DRAINING, SPARE, STARTING, acted, rules, see, worker
from tests.unit.autoscale.simulation import Simulation

CAPPED = ScalingConfig(max_price_per_hour=3.5)


@pytest.mark.parametrize(("price", "workers"), [(1.0, 3), (2.0, 1), (3.5, 1), (0.35, 10), (None, 0), (4.0, 0)])
def test_the_sum_of_prices_never_exceeds_the_limit(price: float | None, workers: int) -> None:
    simulation = Simulation(CAPPED, lambda at: 20.0, unit_price=price)
    for _ in simulation.ticks(6000):
        assert simulation.price <= 3.5 + 1e-9
    assert simulation.live == workers
    assert simulation.outcome is not None
    assert simulation.outcome.scale_blocked is Limit.MAX_PRICE
    assert simulation.state is (DeploymentState.ACTIVE if workers else DeploymentState.INACTIVE)


def test_a_free_machine_helps_nobody_who_pays_too_much_already() -> None:
    leaving = worker("b", DRAINING, price_per_hour=3.0, running=1)
    fleet = (worker("a", price_per_hour=1.0), leaving)
    assert see(CAPPED, 0, *fleet, unit_price=0.0, asked=3).actions == ()
    assert see(CAPPED, 0, fleet[0], unit_price=0.0, asked=1).scale_blocked is None


def test_prices_add_up_over_different_workers() -> None:
    fleet = (worker("a", price_per_hour=1.0), worker("b", DRAINING, price_per_hour=1.5, running=1))
    assert see(CAPPED, 0, *fleet, unit_price=1.0, asked=5).actions == (Start(1),)
    assert see(CAPPED, 0, *fleet, unit_price=2.0, asked=5).actions == ()


def test_a_limit_below_the_current_price_removes_the_most_expensive_worker() -> None:
    config = ScalingConfig(max_price_per_hour=3.5, immediate_scale_down=True)
    fleet = (worker("a", price_per_hour=1.0), worker("b", price_per_hour=2.0), worker("c", price_per_hour=1.0))
    outcome = see(config, 0, *fleet, unit_price=1.0)
    assert outcome.actions == (Drain("b"),)
    assert rules(outcome) == [Rule.ABOVE_CAP]


def test_workers_are_removed_in_order() -> None:
    fleet = [
        worker("busy", running=5, spot=True, price_per_hour=9.0),
        worker("cheap", price_per_hour=1.0, launched_at=1),
        worker("young", price_per_hour=2.0, launched_at=9),
        worker("old", price_per_hour=2.0, launched_at=2),
        worker("spot", spot=True, price_per_hour=0.5),
        worker("starting", STARTING),
    ]
    outcome = see(ScalingConfig(), 0, *fleet, asked=0, unit_price=1.0)
    assert outcome.actions == (
        Kill("starting"),
        Drain("spot"),
        Drain("young"),
        Drain("old"),
        Drain("cheap"),
        Drain("busy"),
    )


def test_cost_adds_billed_workers_over_time() -> None:
    fleet = [
        worker("a", STARTING, price_per_hour=1.0),
        worker("b", price_per_hour=2.0),
        worker("c", DRAINING, price_per_hour=4.0),
        worker("d", SPARE, price_per_hour=8.0),
    ]
    assert current_price(fleet) == 7.0
    assert cost(7.0, 1800) == 3.5
    assert cost(7.0, -1) == 0.0
    assert current_price([]) == 0


def test_a_spare_is_kept_promoted_and_recreated_after_a_minute() -> None:
    simulation = Simulation(ScalingConfig(fast=True), lambda at: 3.0).run(200)
    assert simulation.count(SPARE) == 1
    spare = next(key for key, each in simulation.workers.items() if each.state is SPARE)
    simulation.run(330)
    outcome = simulation.step()
    assert outcome.actions == (Promote(spare),)
    simulation.start_up_s = 5
    prepared = []
    for outcome in simulation.ticks(500):
        prepared += [outcome.decisions[0].at] if Prepare() in outcome.actions else []
    assert prepared == [390]


def test_waking_promotes_the_spare_and_starts_the_rest() -> None:
    config = ScalingConfig(fast=True, min_workers=2)
    outcome = see(config, 0, worker("s", SPARE))
    assert outcome.actions == (Promote("s"), Start(1))


def test_no_spare_at_the_cap_and_none_without_a_deployment() -> None:
    fast = ScalingConfig(fast=True, max_workers=1)
    assert see(fast, 0, worker("a")).actions == ()
    assert see(fast, 0).actions == (Prepare(),)
    assert see(fast, 0, worker("s", SPARE), stopped=True).actions == (Kill("s"),)
    assert see(ScalingConfig(), 0, worker("s", SPARE)).actions == (Kill("s"),)


@pytest.mark.parametrize(
    ("fields", "fault"),
    [
        ({"min_workers": -1}, Fault.WORKERS),
        ({"min_workers": 2, "max_workers": 1}, Fault.WORKERS),
        ({"max_workers": 0}, Fault.WORKERS),
        ({"lower": 1.0}, Fault.THRESHOLDS),
        ({"lower": -0.1}, Fault.THRESHOLDS),
        ({"upper": float("nan")}, Fault.THRESHOLDS),
        ({"up_window_s": -1.0}, Fault.TIMES),
        ({"idle_timeout_s": float("nan")}, Fault.TIMES),
        ({"scale_to_zero": True, "min_workers": 1}, Fault.ZERO_WITH_MINIMUM),
        ({"max_price_per_hour": 0.0}, Fault.PRICE),
        ({"min_throughput_rate": 0.0}, Fault.THROUGHPUT),
    ],
)
def test_contradictions_are_refused(fields: dict[str, float], fault: Fault) -> None:
    with pytest.raises(InvalidScaling) as refusal:
        ScalingConfig(**fields)  # type: ignore[arg-type]
    assert refusal.value.fault is fault


@pytest.mark.parametrize(("up", "down", "tick"), [(300, 300, 5), (25, 300, 5), (20, 10, 2), (1, 300, 1), (5, 5, 1)])
def test_the_tick_follows_the_windows(up: float, down: float, tick: float) -> None:
    assert ScalingConfig(up_window_s=up, down_window_s=down).tick_s == tick


def test_decisions_have_the_facts_of_their_tick() -> None:
    config = ScalingConfig(strategy=Strategy.RPS, max_workers=8)
    simulation = Simulation(config, lambda at: 6.0).run(335)
    assert acted(simulation) == [(0, Rule.WAKE), (330, Rule.UP)]
    decision = simulation.decisions[-1]
    assert decision.measure is not None
    assert (decision.measure.value, decision.measure.samples, decision.measure.window_s) == (6.0, 1800, 300)
    assert (decision.ready, decision.live, decision.cap, decision.target) == (1, 1, 8, 2)
    assert (decision.upper, decision.lower) == (1.0, 0.2)
    assert decision.actions == (Start(1),)


def test_numbers_that_overflow_are_no_error() -> None:
    dear = ScalingConfig(max_price_per_hour=1e308)
    assert see(dear, 0, worker("a", price_per_hour=0.1), unit_price=0.1, asked=2).actions == (Start(1),)
    fast = ScalingConfig(min_throughput_rate=1e308, max_workers=3)
    slow = Memory(served=(ServedRate(at=0.0, rate=1e-3),), target=2)
    assert see(fast, 1, worker("a"), worker("b"), memory=slow).actions == (Start(1),)


@pytest.mark.parametrize("limit", [Limit.MAX_PRICE, Limit.CAPACITY])
def test_a_start_waits_for_room_or_money(limit: Limit) -> None:
    blocked = {"unit_price": 9.0} if limit is Limit.MAX_PRICE else {"unit_price": 1.0, "capacity": 0}
    outcome = see(CAPPED, 0, asked=2, **blocked)
    for at in (10, 20, 30):
        assert (outcome.actions, outcome.scale_blocked) == ((), limit)
        assert outcome.state is DeploymentState.PROVISIONING
        outcome = see(CAPPED, at, memory=outcome.memory, **blocked)
    assert see(CAPPED, 40, memory=outcome.memory, unit_price=1.0).actions == (Start(2),)


@pytest.mark.parametrize(
    ("prices", "unit_price", "cap"),
    [
        ((), 1.0, 3),
        ((1.0,), 1.0, 3),
        ((1.5, 1.0), 1.0, 3),
        ((1.5, 2.0), 1.0, 2),
        ((1.5, 2.0), 0.0, None),
        ((1.5, 2.0), None, 2),
        ((1.5, 2.1), 1.0, 1),
        ((1.5, 2.0, 1.0), 1.0, 2),
        ((), 0.0, None),
    ],
)
def test_how_many_workers_a_price_allows(prices: tuple[float, ...], unit_price: float | None, cap: int | None) -> None:
    ready = tuple(worker(str(number), price_per_hour=price) for number, price in enumerate(prices))
    observation = Observation(now=0.0, workers=ready, unit_price=unit_price)
    found = cap_of(CAPPED, observation, Fleet((), ready, (), ()))
    assert found == (Cap(CAPPED.max_workers, Limit.MAX_WORKERS) if cap is None else Cap(cap, Limit.MAX_PRICE))
