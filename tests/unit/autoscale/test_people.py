"""What people do: start, scale, stop, change, delete."""

from __future__ import annotations

from management.autoscale.config import ScalingConfig, Strategy
from management.autoscale.decision import Abort, DeploymentState, Drain, Kill, Rule, Start
from tests.unit.autoscale.helpers import DRAINING, SPARE, STARTING, acted, rules, see, worker
from tests.unit.autoscale.simulation import Simulation


def test_a_start_starts_the_first_workers() -> None:
    simulation = Simulation(ScalingConfig(), lambda at: 0.0).run(100)
    simulation.act(asked=1)
    assert simulation.step().actions == (Start(1),)
    assert simulation.state is DeploymentState.PROVISIONING


def test_a_start_never_goes_below_the_minimum_or_above_the_maximum() -> None:
    config = ScalingConfig(min_workers=2, max_workers=3)
    assert see(config, 0, asked=1).actions == (Start(2),)
    assert see(config, 0, asked=9).actions == (Start(3),)


def test_scaling_up_adds_to_running_workers() -> None:
    simulation = Simulation(ScalingConfig(), lambda at: 1.0).run(100)
    simulation.act(asked=2)
    assert simulation.step().actions == (Start(1),)
    simulation.run(200)
    assert simulation.live == 2


def test_an_action_acts_once() -> None:
    simulation = Simulation(ScalingConfig(down_window_s=50), lambda at: 0.0)
    simulation.act(asked=3)
    simulation.run(1000)
    assert simulation.live == 1


def test_scaling_down_by_hand_is_immediate_and_takes_starting_workers_first() -> None:
    outcome = see(ScalingConfig(), 0, worker("a", running=1), worker("b"), worker("c", STARTING), asked=1)
    assert outcome.actions == (Kill("c"), Drain("b"))


def test_a_stop_drains_and_nothing_wakes_it() -> None:
    simulation = Simulation(ScalingConfig(min_workers=2), lambda at: 1.0).run(100)
    simulation.act(stopped=True)
    outcome = simulation.step()
    assert rules(outcome) == [Rule.STOP]
    assert len(outcome.actions) == 2
    assert simulation.state is DeploymentState.INACTIVE
    simulation.run(2000)
    assert simulation.held > 100
    assert simulation.workers == {}
    simulation.act(asked=1)
    simulation.run(2100)
    assert simulation.live == 2


def test_a_stopped_deployment_that_scales_to_zero_wakes_on_a_request() -> None:
    simulation = Simulation(ScalingConfig(scale_to_zero=True), lambda at: 1.0 if at > 500 else 0.0, asked=1).run(100)
    simulation.act(stopped=True)
    simulation.run(500)
    assert simulation.live == 0
    simulation.run(1000)
    assert simulation.state is DeploymentState.ACTIVE


def test_a_forced_stop_ends_requests_at_once() -> None:
    first = see(ScalingConfig(), 0, worker("a"), worker("b", STARTING))
    busy = worker("c", DRAINING, since=4, running=2)
    outcome = see(
        ScalingConfig(),
        5,
        worker("a", running=1),
        worker("b", STARTING),
        busy,
        memory=first.memory,
        generation=2,
        stopped=True,
        force=True,
    )
    assert set(outcome.actions) == {Abort("a"), Kill("b")}
    outcome = see(ScalingConfig(), 10, busy, memory=outcome.memory, generation=2, stopped=True, force=True)
    assert outcome.actions == (Abort("c"),)


def test_a_stopped_start_that_appears_late_is_removed() -> None:
    outcome = see(ScalingConfig(), 0, stopped=True)
    outcome = see(ScalingConfig(), 5, worker("late", STARTING), memory=outcome.memory, stopped=True)
    assert outcome.actions == (Kill("late"),)


def test_deleting_drains_and_ends() -> None:
    simulation = Simulation(ScalingConfig(min_workers=2), lambda at: 5.0).run(335)
    assert simulation.live == 3
    simulation.deleting = True
    outcome = simulation.step()
    assert rules(outcome) == [Rule.DELETE]
    assert len([action for action in outcome.actions if isinstance(action, Kill)]) == 1
    assert len([action for action in outcome.actions if isinstance(action, Drain)]) == 2
    assert simulation.state is DeploymentState.DELETING
    simulation.run(1000)
    assert simulation.state is DeploymentState.DELETED
    assert simulation.workers == {}
    assert simulation.step().actions == ()


def test_a_forced_deletion_ends_everything_at_once() -> None:
    outcome = see(
        ScalingConfig(), 0, worker("a", running=9), worker("b", STARTING), worker("c", SPARE), deleting=True, force=True
    )
    assert set(outcome.actions) == {Abort("a"), Kill("b"), Kill("c")}


def test_deleting_a_sleeping_deployment_needs_one_tick() -> None:
    outcome = see(ScalingConfig(), 0, deleting=True)
    assert outcome.state is DeploymentState.DELETED
    assert outcome.decisions == ()


def test_a_change_restarts_the_windows() -> None:
    simulation = Simulation(ScalingConfig(), lambda at: 3.0).run(320)
    simulation.update(upper=2.0)
    simulation.run(640)
    assert acted(simulation) == [(0, Rule.WAKE), (620, Rule.UP)]


def test_a_new_strategy_looks_at_new_samples_only() -> None:
    simulation = Simulation(ScalingConfig(), lambda at: 0.8).run(2000)
    simulation.update(strategy=Strategy.RPS, upper=0.5, lower=0.1)
    simulation.run(2300)
    assert acted(simulation) == [(0, Rule.WAKE)]
    simulation.run(2305)
    assert acted(simulation) == [(0, Rule.WAKE), (2300, Rule.UP)]


def test_a_higher_minimum_acts_at_once() -> None:
    simulation = Simulation(ScalingConfig(), lambda at: 0.8).run(400)
    simulation.update(min_workers=3)
    assert simulation.step().actions == (Start(2),)


def test_equal_minimum_and_maximum_never_act() -> None:
    for load in (0.0, 100.0):
        simulation = Simulation(ScalingConfig(min_workers=2, max_workers=2), lambda at, load=load: load).run(5000)
        assert simulation.live == 2
        assert [action for d in simulation.decisions for action in d.actions] == [Start(2)]
