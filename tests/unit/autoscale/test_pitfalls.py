"""What went wrong in other autoscalers, one test each."""

from __future__ import annotations

from itertools import pairwise

from management.autoscale.config import ScalingConfig, Strategy
from management.autoscale.decision import DeploymentState, Kill, Rule, Start
from management.autoscale.signals import LoadGauges, LoadSlice
from tests.unit.autoscale.helpers import READY, STARTING, acted, actions_of, known, rules, see, worker
from tests.unit.autoscale.simulation import Simulation

ZERO = ScalingConfig(scale_to_zero=True, idle_timeout_s=100, down_window_s=50)


def pulse(at: float) -> float:
    return 1.0 if at < 100 else 0.0


def test_a_leaked_count_of_running_requests_heals_with_the_next_report() -> None:
    simulation = Simulation(ZERO, pulse).run(100)
    simulation.running = 1
    simulation.run(500)
    assert simulation.live == 1
    simulation.running = 0
    simulation.run(505)
    assert simulation.live == 0


def test_the_queue_of_a_dead_process_does_not_wake_for_ever() -> None:
    history = known(0, LoadGauges(held=4))
    outcome = see(ZERO, 0, history=history)
    assert outcome.actions == (Start(1),)
    history.sign_off("web")
    history.report("new", 200, (), LoadGauges())
    memory = outcome.memory
    decided = []
    for at in range(200, 400, 5):
        history.report("new", at, (), LoadGauges())
        outcome = see(ZERO, at, *(() if Rule.ZERO in decided else (worker("a"),)), memory=memory, history=history)
        memory = outcome.memory
        decided += rules(outcome)
    assert decided == [Rule.ZERO]


def test_a_silent_process_with_a_queue_wakes_nobody() -> None:
    history = known(0, LoadGauges(held=4))
    history.report("alive", 100, (), LoadGauges())
    assert see(ZERO, 100, history=history).actions == ()


def test_a_minimum_of_zero_is_honoured_at_the_start() -> None:
    assert see(ZERO, 0).state is DeploymentState.INACTIVE


def test_removal_takes_starting_workers_before_ready_ones() -> None:
    config = ScalingConfig(max_workers=2, immediate_scale_down=True)
    fleet = (worker("a", READY), worker("b", READY), worker("c", STARTING))
    memory = see(config, 0, *fleet).memory
    outcome = see(config, 5, *fleet, memory=memory)
    assert rules(see(config, 0, *fleet)) == [Rule.ABOVE_CAP]
    assert see(config, 0, *fleet).actions == (Kill("c"),)
    assert outcome.actions == (Kill("c"),)


def test_a_short_delay_and_a_long_window_do_not_thrash() -> None:
    config = ScalingConfig(up_window_s=300, down_window_s=10)
    simulation = Simulation(config, lambda at: 1.5).run(7200)
    changes = [rule for _, rule in acted(simulation) if rule in (Rule.UP, Rule.DOWN)]
    assert changes == [Rule.UP]


def test_a_queue_divided_over_new_workers_does_not_look_idle() -> None:
    """The new worker makes the metric fall below the lower threshold; no removal before a full window."""
    simulation = Simulation(ScalingConfig(lower=0.9), lambda at: 1.0).run(655)
    assert acted(simulation) == [(0, Rule.WAKE), (330, Rule.UP)]
    simulation.run(665)
    assert acted(simulation)[-1] == (660, Rule.DOWN)


def test_flapping_latency_lengthens_the_down_window() -> None:
    """One worker is too slow and two are too fast: no number is right, so changes become rare."""
    simulation = Simulation(ScalingConfig(lower=0.9), lambda at: 1.0).run(40_000)
    downs = [at for at, rule in acted(simulation) if rule is Rule.DOWN]
    waits = [later - earlier for earlier, later in pairwise(downs)]
    assert waits[:5] == [930, 1530, 2730, 2730, 2730]


def test_growth_in_several_steps_after_one_removal_is_one_flap() -> None:
    simulation = Simulation(ScalingConfig(lower=0.9, up_window_s=50), lambda at: 1.5, asked=3).run(335)
    assert acted(simulation) == [(0, Rule.MANUAL), (330, Rule.DOWN)]
    simulation.load = lambda at: 8.0
    simulation.run(560)
    assert [at for at, rule in acted(simulation) if rule is Rule.UP] == [380, 460, 540]
    assert simulation.memory.flap_factor == 2


def test_quiet_time_ends_the_longer_window() -> None:
    simulation = Simulation(ScalingConfig(lower=0.9), lambda at: 1.0).run(8000)
    assert simulation.memory.flap_factor == 8
    simulation.load = lambda at: 1.78
    simulation.run(13_000)
    assert simulation.memory.flap_factor == 1


def test_one_step_at_a_time_is_not_passed_by_a_short_idle_time() -> None:
    config = ScalingConfig(scale_to_zero=True, idle_timeout_s=1000, down_window_s=100)
    simulation = Simulation(config, lambda at: 3.5 if at < 2000 else 0.0).run(2900)
    counts = [event.workers for event in simulation.events if event.rule is Rule.DOWN]
    assert counts == [3, 2, 1]
    simulation.run(3500)
    assert [rule for _, rule in acted(simulation) if rule is Rule.ZERO] == [Rule.ZERO]


def test_a_deployment_does_not_sleep_before_it_was_ever_ready() -> None:
    config = ScalingConfig(scale_to_zero=True, idle_timeout_s=60)
    simulation = Simulation(config, lambda at: 0.0, asked=1, start_up_s=600).run(600)
    assert simulation.state is DeploymentState.PROVISIONING
    simulation.run(655)
    assert simulation.state is DeploymentState.ACTIVE
    simulation.run(665)
    assert simulation.state is DeploymentState.INACTIVE


def test_a_start_of_nineteen_minutes_is_waited_for() -> None:
    simulation = Simulation(ScalingConfig(), lambda at: 5.0, start_up_s=1140).run(1145)
    assert acted(simulation) == [(0, Rule.WAKE)]
    assert simulation.state is DeploymentState.ACTIVE


def test_a_broken_source_of_metrics_is_not_taken_for_load() -> None:
    """A process that falls over leaves its last high values behind. They grow nothing once they are stale."""
    config = ScalingConfig(up_window_s=50)
    simulation = Simulation(config, lambda at: 0.0, asked=1).run(100)
    simulation.reports = False
    gauges = LoadGauges(waiting=9, waiting_ages_s=(9.0,) * 9)
    simulation.history.report("web-0", 50, (LoadSlice(50.0, 9, 0, 9, 81.0),), gauges)
    simulation.run(2000)
    assert acted(simulation) == [(0, Rule.MANUAL)]


def test_a_burst_between_two_ticks_counts() -> None:
    config = ScalingConfig(strategy=Strategy.RPS, up_window_s=50, down_window_s=50)
    simulation = Simulation(config, lambda at: 0.0, asked=1)
    for _ in range(20):
        at = simulation.now
        simulation.history.report("burst", at, (LoadSlice(at - 2.5, arrivals=50),), LoadGauges())
        simulation.step()
    assert actions_of(simulation, Rule.UP)


def test_an_idle_deployment_does_not_grow_by_old_samples() -> None:
    simulation = Simulation(ScalingConfig(), lambda at: 2.0 if at < 200 else 0.0).run(1000)
    assert acted(simulation) == [(0, Rule.WAKE)]
