"""Waking, sleeping, the floor, the cap, starts that take too long, crashes and drains."""

from __future__ import annotations

from itertools import pairwise

import msgspec
import pytest

from management.autoscale.config import ScalingConfig, Strategy
from management.autoscale.decision import Abort, DeploymentState, Drain, Kill, Rule, Start
from management.autoscale.memory import Failure, Limit, Memory
from management.autoscale.signals import LoadGauges, LoadSlice
from tests.unit.autoscale.helpers import DRAINING, STARTING, acted, actions_of, known, rules, see, worker
from tests.unit.autoscale.simulation import Simulation

ZERO = ScalingConfig(scale_to_zero=True, idle_timeout_s=60)


def silence(at: float) -> float:
    return 0.0


def test_nothing_starts_without_a_request_or_a_minimum() -> None:
    simulation = Simulation(ScalingConfig(), silence).run(600)
    assert simulation.decisions == []
    assert simulation.state is DeploymentState.INACTIVE


@pytest.mark.parametrize(("minimum", "started"), [(0, 1), (1, 1), (3, 3)])
def test_fifty_requests_at_zero_start_the_first_workers_once(minimum: int, started: int) -> None:
    simulation = Simulation(ScalingConfig(min_workers=minimum), silence, held=50)
    simulation.run(30)
    assert (
        sum(action.count for d in simulation.decisions for action in d.actions if isinstance(action, Start)) == started
    )
    assert simulation.state is DeploymentState.PROVISIONING
    simulation.step()
    assert simulation.state is DeploymentState.ACTIVE


def test_a_refused_request_wakes_too() -> None:
    first = see(ZERO, 0)
    history = known(5)
    history.report("web", 5, (LoadSlice(4.0, rejected=1),), LoadGauges())
    outcome = see(ZERO, 5, memory=first.memory, history=history)
    assert outcome.actions == (Start(1),)
    assert rules(outcome) == [Rule.WAKE]


def test_it_sleeps_only_when_nothing_runs() -> None:
    simulation = Simulation(ZERO, lambda at: 1.0 if at < 100 else 0.0).run(100)
    simulation.running = 1
    simulation.run(1000)
    assert simulation.live == 1
    simulation.running = 0
    simulation.run(1015)
    assert simulation.live == 0
    assert simulation.state is DeploymentState.INACTIVE


def test_an_idle_timeout_of_zero_lasts_one_tick() -> None:
    config = ScalingConfig(scale_to_zero=True, idle_timeout_s=0)
    simulation = Simulation(config, lambda at: 1.0 if at < 100 else 0.0).run(200)
    assert acted(simulation) == [(0, Rule.WAKE), (100, Rule.ZERO)]


def test_all_workers_sleep_at_once_from_any_number() -> None:
    outcome = see(ZERO, 0, worker("a"), worker("b"), worker("c"))
    outcome = see(ZERO, 10, worker("a"), worker("b"), worker("c"), memory=outcome.memory)
    assert outcome.actions == ()
    outcome = see(ZERO, 60, worker("a"), worker("b"), worker("c"), memory=outcome.memory)
    # Ticks came late: idle time counts, windows do not.
    assert rules(outcome) == [Rule.ZERO]
    assert set(outcome.actions) == {Drain("a"), Drain("b"), Drain("c")}


def test_missing_workers_start_at_once() -> None:
    outcome = see(ScalingConfig(min_workers=3), 0, worker("a", STARTING))
    assert outcome.actions == (Start(2),)


def test_a_start_that_did_not_happen_is_asked_for_again() -> None:
    simulation = Simulation(ScalingConfig(), lambda at: 3.0).run(335)
    started = next(key for key, each in simulation.workers.items() if each.state is STARTING)
    del simulation.workers[started]
    outcome = simulation.step()
    assert rules(outcome) == [Rule.REPEATED]
    assert outcome.actions == (Start(1),)


def test_a_drain_that_did_not_happen_is_asked_for_again() -> None:
    outcome = see(ZERO, 0, worker("a"))
    memory = see(ZERO, 60, worker("a"), memory=outcome.memory).memory
    outcome = see(ZERO, 65, worker("a"), memory=memory)
    assert outcome.actions == (Drain("a"),)
    assert rules(outcome) == [Rule.REPEATED]
    assert outcome.state is DeploymentState.INACTIVE


def test_drained_workers_stop_and_late_ones_lose_their_requests() -> None:
    config = ScalingConfig(drain_timeout_s=100)
    gone = worker("done", DRAINING, since=0)
    busy = worker("busy", DRAINING, since=0, running=1)
    outcome = see(config, 100, gone, busy)
    assert outcome.actions == (Kill("done"),)
    outcome = see(config, 101, busy, memory=outcome.memory)
    assert outcome.actions == (Abort("busy"),)
    assert rules(outcome) == [Rule.DRAIN_TIMEOUT]
    outcome = see(config, 102, busy, memory=outcome.memory)
    assert outcome.actions == (Abort("busy"),)
    assert rules(outcome) == [Rule.REPEATED]


@pytest.mark.parametrize(("immediate", "times"), [(True, [500, 505]), (False, [800, 1100])])
def test_a_lower_maximum_removes_one_worker_at_a_time(immediate: bool, times: list[float]) -> None:
    simulation = Simulation(ScalingConfig(immediate_scale_down=immediate), lambda at: 2.0, asked=4).run(500)
    assert simulation.live == 4
    simulation.update(max_workers=2)
    simulation.run(1200)
    assert [at for at, rule in acted(simulation) if rule is Rule.ABOVE_CAP] == times
    assert simulation.live == 2


def test_a_start_that_takes_too_long_fails_the_deployment() -> None:
    config = ScalingConfig(start_timeout_s=100)
    simulation = Simulation(config, lambda at: 1.0, starts_work=False).run(1000)
    assert acted(simulation) == [(0, Rule.WAKE), (105, Rule.START_TIMEOUT)]
    assert simulation.state is DeploymentState.FAILED
    assert simulation.memory.failed is Failure.START_TIMEOUT
    assert simulation.live == 0
    simulation.starts_work = True
    simulation.act(asked=1)
    simulation.run(1100)
    assert simulation.state is DeploymentState.ACTIVE
    assert simulation.memory.failures == 0


def test_after_failed_starts_growth_waits_longer_and_longer() -> None:
    config = ScalingConfig(start_timeout_s=100)
    simulation = Simulation(config, lambda at: 3.0).run(300)
    simulation.starts_work = False
    simulation.run(20_000)
    ups = [at for at, rule in acted(simulation) if rule is Rule.UP]
    waits = [later - earlier - 105 for earlier, later in pairwise(ups)]
    assert waits[:5] == [600, 1200, 2400, 2400, 2400]
    assert simulation.state is DeploymentState.ACTIVE


def test_a_crash_is_replaced_at_once_below_the_floor_only() -> None:
    simulation = Simulation(ScalingConfig(min_workers=2), lambda at: 1.0, asked=3).run(300)
    first, second, _ = simulation.workers
    simulation.crash(first)
    assert simulation.step().actions == ()
    simulation.crash(second)
    outcome = simulation.step()
    assert rules(outcome) == [Rule.CRASH]
    assert outcome.actions == (Start(1),)


def test_three_crashes_without_a_served_request_fail_the_deployment() -> None:
    simulation = Simulation(ScalingConfig(), silence, held=1).run(50)
    for until in (100, 150, 200):
        simulation.crash(next(iter(simulation.workers)))
        simulation.run(until)
    assert simulation.state is DeploymentState.FAILED
    assert simulation.memory.failed is Failure.CRASHES
    assert simulation.live == 0
    simulation.held = 5
    simulation.run(2000)
    assert simulation.live == 0


def test_crashes_between_served_requests_do_not() -> None:
    simulation = Simulation(ScalingConfig(), lambda at: 0.2, held=1).run(50)
    for until in range(100, 600, 50):
        simulation.crash(next(iter(simulation.workers)))
        simulation.run(until)
    assert simulation.state is DeploymentState.ACTIVE


def test_the_minimum_rate_is_a_floor_of_active_deployments() -> None:
    simulation = Simulation(ScalingConfig(min_throughput_rate=2.5), lambda at: 0.5).run(200)
    assert simulation.live == 3
    assert [action for action in actions_of(simulation, Rule.BELOW_FLOOR)] == [Start(2)]


def test_a_worker_that_completes_more_lowers_that_floor() -> None:
    config = ScalingConfig(min_throughput_rate=6.0, strategy=Strategy.RPS, upper=5.0, lower=2.5, max_workers=6)
    simulation = Simulation(config, lambda at: 12.0).run(4000)
    # 12 requests per second on 6 workers: 2 each, so 3 are enough for the minimum, and the load's rules decide.
    assert simulation.memory.served[0].rate > 1.9
    assert simulation.live < 6


def test_light_load_is_no_evidence_of_slow_workers() -> None:
    simulation = Simulation(ScalingConfig(min_throughput_rate=2.0), lambda at: 0.01).run(8000)
    assert simulation.live == 2


def test_memory_survives_as_json() -> None:
    simulation = Simulation(ScalingConfig(min_throughput_rate=2.0, fast=True), lambda at: 3.0).run(2000)
    stored = msgspec.json.encode(simulation.memory)
    assert msgspec.json.decode(stored, type=Memory) == simulation.memory


def test_a_clamp_is_published_once_and_as_a_state() -> None:
    simulation = Simulation(ScalingConfig(max_workers=1), lambda at: 3.0).run(900)
    assert simulation.outcome is not None
    assert simulation.outcome.scale_blocked is Limit.MAX_WORKERS
    assert acted(simulation) == [(0, Rule.WAKE), (330, Rule.UP)]
    assert simulation.memory.reset_at == 30


def test_capacity_limits_growth_and_removes_nobody() -> None:
    simulation = Simulation(ScalingConfig(), lambda at: 5.0, capacity=2).run(2000)
    assert simulation.live == 2
    assert simulation.outcome is not None
    assert simulation.outcome.scale_blocked is Limit.CAPACITY
    simulation.capacity = 1
    simulation.run(4000)
    assert simulation.live == 2
