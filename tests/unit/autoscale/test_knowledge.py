"""What is known of the load: windows over several processes, reports that stop, delayed ticks, restarts."""

from __future__ import annotations

import pytest

from management.autoscale.config import ScalingConfig, Strategy
from management.autoscale.decision import Rule
from management.autoscale.metric import measure
from management.autoscale.signals import History, LoadGauges, LoadSlice
from tests.unit.autoscale.helpers import acted, known
from tests.unit.autoscale.simulation import Simulation

TTFT = ScalingConfig()


def test_means_are_over_the_samples_of_all_processes() -> None:
    history = History(300)
    history.report("one", 100, (LoadSlice(100, first_tokens=1, ttft_total_s=4.0),), LoadGauges())
    history.report("two", 100, (LoadSlice(99, first_tokens=3, ttft_total_s=0.0),), LoadGauges())
    seen = measure(TTFT, history, 100, 50, ready=2)
    assert (seen.value, seen.samples) == (1.0, 4)


def test_a_window_excludes_its_beginning_and_includes_its_end() -> None:
    history = History(300)
    slices = tuple(LoadSlice(float(at), first_tokens=1, ttft_total_s=at) for at in (50, 51, 100))
    history.report("web", 100, slices, LoadGauges())
    assert measure(TTFT, history, 100, 50, 1).samples == 2
    assert measure(TTFT, history, 99, 50, 1).samples == 2


def test_a_slice_reported_twice_counts_once() -> None:
    history = History(300)
    for at in (100, 101):
        history.report("web", at, (LoadSlice(100, first_tokens=1, ttft_total_s=1.0),), LoadGauges())
    assert measure(TTFT, history, 101, 50, 1).samples == 1


def test_old_slices_are_forgotten() -> None:
    history = History(10)
    for at in range(1000):
        history.report("web", at, (LoadSlice(at, arrivals=1),), LoadGauges())
    assert len(list(history.within(999, 10_000))) == 10


def test_a_rate_counts_refused_requests_and_divides_by_ready_workers() -> None:
    config = ScalingConfig(strategy=Strategy.RPS)
    history = History(300)
    history.report("web", 10, (LoadSlice(10, arrivals=30, rejected=10),), LoadGauges())
    assert measure(config, history, 10, 10, ready=2).value == 2.0


@pytest.mark.parametrize(
    ("strategy", "gauges"),
    [
        (Strategy.TTFT, LoadGauges(waiting=3, waiting_ages_s=(0.5, 1.0, 7.0))),
        (Strategy.E2E, LoadGauges(running=3, running_ages_s=(0.5, 1.0, 7.0))),
    ],
)
def test_requests_that_are_stuck_count_with_their_age(strategy: Strategy, gauges: LoadGauges) -> None:
    config = ScalingConfig(strategy=strategy)
    seen = measure(config, known(100, gauges), 100, 300, 1)
    assert (seen.value, seen.samples) == (7.0, 1)
    # Short waits do not count because the report is old, and a stale report says nothing.
    assert measure(config, known(98, gauges), 100, 300, 1) == seen
    assert measure(config, known(80, gauges), 100, 300, 1).value is None


def test_completions_have_a_mean() -> None:
    history = known(10)
    history.report("web", 11, (LoadSlice(11, completions=2, e2e_total_s=5.0),), LoadGauges())
    assert measure(ScalingConfig(strategy=Strategy.E2E), history, 11, 10, 1).value == 2.5


def test_requests_stuck_without_any_first_token_grow_the_deployment() -> None:
    simulation = Simulation(TTFT, lambda at: 0.0, asked=1).run(40)
    simulation.reports = False
    while simulation.now <= 340:
        gauges = LoadGauges(waiting=1, waiting_ages_s=(simulation.now - 35,))
        simulation.history.report("web-0", simulation.now, (), gauges)
        simulation.step()
    assert (330, Rule.UP) in acted(simulation)


@pytest.mark.parametrize("config", [TTFT, ScalingConfig(strategy=Strategy.RPS), ScalingConfig(scale_to_zero=True)])
def test_ten_minutes_without_reports_change_nothing(config: ScalingConfig) -> None:
    simulation = Simulation(config, lambda at: 2.5 if at < 1500 else 0.0).run(1400)
    before = simulation.live
    assert before > 1
    simulation.reports = False
    simulation.run(2000)
    assert simulation.live == before
    simulation.reports = True
    simulation.run(2250)
    assert simulation.live == before, "a window that nobody saw is not idle"
    simulation.run(2400)
    assert simulation.live == before - 1


def test_one_silent_process_blocks_shrinking_but_not_growth() -> None:
    simulation = Simulation(ScalingConfig(strategy=Strategy.RPS), lambda at: 2.0)
    simulation.history.report("silent", 0, (), LoadGauges())
    simulation.run(400)
    assert (330, Rule.UP) in acted(simulation)
    simulation.load = lambda at: 0.0
    simulation.run(3000)
    assert simulation.live == 2
    simulation.history.sign_off("silent")
    simulation.run(3400)
    assert simulation.live == 1


def test_no_reporting_process_is_unknown() -> None:
    history = History(300)
    assert history.is_unknown(0, 15)
    history.report("web", 0, (LoadSlice(0, arrivals=1),), LoadGauges())
    assert not history.is_unknown(15, 15)
    assert history.is_unknown(15.1, 15)
    history.sign_off("web")
    assert history.is_unknown(0, 15)
    history.report("web", 20, (), LoadGauges())
    assert not history.is_unknown(20, 15)
    assert history.report_ages_s(22) == {"web": 2}


def test_a_suspended_process_starts_its_windows_anew() -> None:
    simulation = Simulation(TTFT, lambda at: 3.0).run(325)
    simulation.now = 345.1
    simulation.run(640)
    assert acted(simulation) == [(0, Rule.WAKE)]
    simulation.run(650)
    assert len(acted(simulation)) == 2


def test_a_tick_delayed_by_three_ticks_does_not() -> None:
    simulation = Simulation(TTFT, lambda at: 3.0).run(325)
    simulation.now = 335
    simulation.step()
    assert acted(simulation) == [(0, Rule.WAKE), (335, Rule.UP)]


def test_a_restart_keeps_what_people_asked_for_and_forgets_times() -> None:
    simulation = Simulation(ScalingConfig(scale_to_zero=True, idle_timeout_s=300), lambda at: 1.0 if at < 100 else 0.0)
    simulation.run(390)
    simulation.memory = simulation.memory.restarted(390)
    simulation.run(1000)
    assert acted(simulation) == [(0, Rule.WAKE), (690, Rule.ZERO)]


def test_workers_found_without_a_memory_are_adopted() -> None:
    simulation = Simulation(TTFT, lambda at: 2.5).run(1500)
    before, decisions = simulation.live, len(simulation.decisions)
    simulation.memory = type(simulation.memory)()
    simulation.run(1700)
    assert simulation.live == before
    assert len(simulation.decisions) == decisions


@pytest.mark.parametrize("is_stored", [True, False])
def test_a_restart_in_mid_growth_starts_no_worker_twice(is_stored: bool) -> None:
    simulation = Simulation(TTFT, lambda at: 1.5).run(340)
    assert simulation.live == 2
    simulation.memory = simulation.memory.restarted(340) if is_stored else type(simulation.memory)()
    simulation.run(600)
    assert acted(simulation) == [(0, Rule.WAKE), (330, Rule.UP)]
    assert simulation.live == 2


def test_windows_longer_than_uptime_never_act() -> None:
    config = ScalingConfig(up_window_s=86_400, down_window_s=86_400)
    simulation = Simulation(config, lambda at: 5.0, asked=2).run(20_000)
    assert [rule for _, rule in acted(simulation)] == [Rule.MANUAL]


def test_windows_of_zero_are_five_seconds() -> None:
    config = ScalingConfig(up_window_s=0, down_window_s=0)
    assert (config.up_window_s, config.tick_s, config.recent_s) == (5.0, 1.0, 2.0)
    simulation = Simulation(config, lambda at: 3.0).run(600)
    assert simulation.live == 4


def test_requests_of_a_cold_start_are_no_load() -> None:
    simulation = Simulation(TTFT, lambda at: 0.5, start_up_s=200).run(3000)
    assert acted(simulation) == [(0, Rule.WAKE)]
