"""The reconciler and the scaling rules together: load comes in, workers come and go, decisions are recorded."""

from __future__ import annotations

import json
from dataclasses import dataclass

import pytest

from engine.failures import ExitStatus
from management import scaling
from management.autoscale.signals import LoadGauges, LoadSlice
from management.load import DeploymentLoad, LoadReport
from management.models import AuditEvent, Deployment, Price, Worker
from management.services.deployments import (
    change_deployment,
    delete_deployment,
    scale_up,
    set_workers,
    start_deployment,
    stop_deployment,
)
from management.services.errors import RegistryConflict, RegistryError
from management.snapshot import Availability


@dataclass
class ShiftedClock:
    """The clock of another machine."""

    clock: object
    shift_s: float

    @property
    def now(self):
        return self.clock.now + self.shift_s


class Front:
    """A web process whose load the test sets."""

    def __init__(self, clock, deployment):
        self.clock, self.deployment = clock, deployment
        self.per_second = LoadSlice(at=0.0)
        self.gauges = LoadGauges()
        self.silent = False
        self._report = LoadReport("web", clock.now, {})

    def reports(self):
        if not self.silent and abs(self.clock.now - self._report.at) >= 1:
            piece = LoadSlice(
                at=self.clock.now,
                arrivals=self.per_second.arrivals,
                first_tokens=self.per_second.first_tokens,
                ttft_total_s=self.per_second.ttft_total_s,
                completions=self.per_second.completions,
            )
            active = self.clock.now if piece.arrivals or self.gauges.held else None
            gauges = LoadGauges(running=self.gauges.running, held=self.gauges.held, last_activity_at=active)
            load = DeploymentLoad((piece,), gauges)
            self._report = LoadReport("web", self.clock.now, {self.deployment.public_id: load})
        return (self._report,)


@pytest.fixture
def front(reconciler, clock, deployment):
    reconciler.load = Front(clock, deployment)
    return reconciler.load


def scalable(deployment, **fields):
    defaults = {"min_workers": 0, "max_workers": 3, "up_window_s": 10, "down_window_s": 10, "idle_timeout_s": 60}
    change_deployment(deployment, "tester", **{**defaults, **fields})


def passes(reconciler, launcher, clock, seconds, ready=True):
    for _ in range(int(seconds * 2)):
        clock.now += 0.5
        for worker in launcher.workers:
            if worker.code is None and ready and not getattr(worker, "said", False):
                worker.ready()
                worker.said = True
            elif worker.code is None and not worker.drained:
                worker.beat()
            if worker.drained and worker.code is None:
                worker.code = 0
        reconciler.reconcile_once()


def live(deployment):
    return Worker.objects.filter(deployment=deployment, state=Worker.State.READY).count()


def test_load_brings_workers_and_its_end_takes_them(reconciler, launcher, clock, front, deployment):
    scalable(deployment)
    start_deployment(deployment, "tester")
    front.per_second = LoadSlice(at=0.0, arrivals=3, first_tokens=3, ttft_total_s=9.0, completions=3)
    passes(reconciler, launcher, clock, 60)
    assert live(deployment) == 3
    deployment.refresh_from_db()
    assert deployment.scale_blocked == "max_workers"
    front.per_second = LoadSlice(at=0.0, arrivals=1, first_tokens=1, ttft_total_s=0.01, completions=1)
    passes(reconciler, launcher, clock, 60)
    assert live(deployment) == 1
    rules = [event.action.rpartition(".")[2] for event in AuditEvent.objects.filter(actor="autoscaler")]
    assert {"manual", "up", "down"} <= set(rules)
    event = AuditEvent.objects.filter(action="deployment.scaling.up", details__live=1).first()
    assert event.details["metric"] == pytest.approx(3.0)
    json.dumps(event.details)


def test_unknown_load_removes_nothing(reconciler, launcher, clock, front, deployment):
    scalable(deployment, scale_to_zero=True)
    start_deployment(deployment, "tester", replicas=2)
    passes(reconciler, launcher, clock, 3)
    front.silent = True
    passes(reconciler, launcher, clock, 300)
    assert live(deployment) == 2


@pytest.mark.parametrize("seconds", [20, 3600])
@pytest.mark.parametrize("suspended", ["web", "reconciler"])
def test_a_suspended_machine_is_heard_again(reconciler, launcher, clock, front, deployment, suspended, seconds):
    """Its monotonic clock has stood still meanwhile."""
    scalable(deployment, scale_to_zero=True)
    start_deployment(deployment, "tester")
    passes(reconciler, launcher, clock, 10)
    if suspended == "web":
        clock.now += seconds
    front.clock = ShiftedClock(clock, -seconds if suspended == "web" else seconds)
    passes(reconciler, launcher, clock, 200)
    assert live(deployment) == 0
    front.gauges = LoadGauges(held=1)
    passes(reconciler, launcher, clock, 3)
    assert live(deployment) == 1


def test_a_shifted_clock_counts_no_request_twice(clock, deployment):
    scaler, loads = scaling.Scaler.of(deployment, clock.now), scaling.LoadHistory()
    slices = []
    for second in range(400):
        clock.now += 500 if second == 200 else 1
        slices = [*slices, LoadSlice(at=float(second), arrivals=1)][-30:]
        load = DeploymentLoad(tuple(slices))
        loads.take([LoadReport("web", float(second), {deployment.public_id: load})], {deployment.public_id: scaler})
    assert sum(piece.arrivals for piece in scaler.history.within(clock.now, 1000)) == 400


def test_an_idle_deployment_sleeps_and_a_held_request_wakes_it(reconciler, launcher, clock, front, deployment):
    scalable(deployment, scale_to_zero=True)
    start_deployment(deployment, "tester")
    passes(reconciler, launcher, clock, 90)
    deployment.refresh_from_db()
    assert (live(deployment), deployment.state) == (0, Deployment.State.INACTIVE)
    assert reconciler.holder.current.deployments[0].availability == "asleep"
    launched = len(launcher.workers)
    front.gauges = LoadGauges(held=50)
    passes(reconciler, launcher, clock, 4)
    assert (live(deployment), len(launcher.workers)) == (1, launched + 1)


@pytest.mark.parametrize(("scale_to_zero", "workers"), [(True, 1), (False, 0)])
def test_who_was_stopped_wakes_only_if_it_may_sleep(
    reconciler, launcher, clock, front, deployment, scale_to_zero, workers
):
    scalable(deployment, scale_to_zero=scale_to_zero)
    start_deployment(deployment, "tester")
    passes(reconciler, launcher, clock, 2)
    stop_deployment(deployment, "tester")
    passes(reconciler, launcher, clock, 4)
    assert live(deployment) == 0
    assert bool(reconciler.holder.current.deployments) is scale_to_zero
    front.gauges = LoadGauges(held=1)
    passes(reconciler, launcher, clock, 4)
    front.gauges = LoadGauges(running=1)
    passes(reconciler, launcher, clock, 20)
    assert live(deployment) == workers


@pytest.fixture
def woken(reconciler, launcher, clock, front, deployment):
    """A deployment that a person stopped and a request has woken."""
    scalable(deployment, scale_to_zero=True)
    start_deployment(deployment, "tester")
    passes(reconciler, launcher, clock, 4)
    assert stop_deployment(deployment, "tester")
    passes(reconciler, launcher, clock, 4)
    assert (live(deployment), stop_deployment(deployment, "tester")) == (0, False)
    front.gauges = LoadGauges(held=1)
    passes(reconciler, launcher, clock, 4)
    front.gauges = LoadGauges(running=1)
    passes(reconciler, launcher, clock, 1)
    assert live(deployment) == 1
    return deployment


def test_who_was_stopped_and_woken_can_be_stopped_again(reconciler, launcher, clock, front, woken):
    assert stop_deployment(woken, "tester")
    front.gauges = LoadGauges()
    passes(reconciler, launcher, clock, 4)
    assert live(woken) == 0
    assert not stop_deployment(woken, "tester")


def test_who_was_stopped_and_woken_serves_on_when_it_may_no_longer_sleep(reconciler, launcher, clock, woken):
    change_deployment(woken, "tester", scale_to_zero=False)
    woken.refresh_from_db()
    assert (woken.wakeable, woken.current_state) == (True, "active")
    passes(reconciler, launcher, clock, 4)
    (entry,) = reconciler.holder.current.deployments
    assert (len(entry.workers), reconciler.holder.current.stopped) == (1, frozenset())


def test_who_was_stopped_and_woken_serves_on_when_a_change_cannot_be_served(reconciler, launcher, clock, woken):
    serving = launcher.workers[-1]
    change_deployment(woken, "tester", engine_options={"max_num_seqs": 8})
    passes(reconciler, launcher, clock, 2, ready=False)
    launcher.workers[-1].fail(ExitStatus.MODEL_REFUSED, "no")
    passes(reconciler, launcher, clock, 4)
    woken.refresh_from_db()
    assert (serving.drained, live(woken)) == (False, 1)
    assert (woken.state, woken.reason) == ("active", "no")
    assert stop_deployment(woken, "tester")
    passes(reconciler, launcher, clock, 4)
    assert live(woken) == 0


def test_a_change_wakes_a_sleeping_deployment(reconciler, launcher, clock, front, deployment):
    scalable(deployment, scale_to_zero=True, idle_timeout_s=5)
    start_deployment(deployment, "tester")
    passes(reconciler, launcher, clock, 20)
    assert live(deployment) == 0
    change_deployment(deployment, "tester", max_workers=2)
    passes(reconciler, launcher, clock, 2)
    assert live(deployment) == 1


def test_a_change_of_rules_keeps_the_workers(reconciler, launcher, clock, front, deployment):
    scalable(deployment)
    start_deployment(deployment, "tester", replicas=3)
    passes(reconciler, launcher, clock, 2)
    change_deployment(deployment, "tester", down_window_s=600)
    passes(reconciler, launcher, clock, 10)
    assert (live(deployment), len(launcher.workers)) == (3, 3)


def test_the_price_limits_and_is_summed(reconciler, launcher, clock, front, deployment):
    Price.objects.update_or_create(gpu_type="", defaults={"price_per_hour": 1.5})
    scalable(deployment, max_price_per_hour=3.5, down_window_s=3600)
    start_deployment(deployment, "tester", replicas=3)
    passes(reconciler, launcher, clock, 60)
    deployment.refresh_from_db()
    assert (live(deployment), deployment.price_per_hour) == (2, 3.0)
    assert AuditEvent.objects.filter(actor="autoscaler", details__blocked="max_price_per_hour").exists()
    assert 0.03 < deployment.cost < 0.06  # a minute of two workers


def test_a_price_that_allows_no_worker_is_told_until_there_is_one(reconciler, launcher, clock, front, deployment):
    def expects():
        (entry,) = reconciler.snapshot().deployments
        return entry.availability

    price, _ = Price.objects.update_or_create(gpu_type="", defaults={"price_per_hour": 4.0})
    scalable(deployment, max_price_per_hour=3.5)
    start_deployment(deployment, "tester")
    passes(reconciler, launcher, clock, 2)
    assert (live(deployment), expects()) == (0, Availability.TOO_DEAR)
    Price.objects.filter(pk=price.pk).update(price_per_hour=3.0)
    passes(reconciler, launcher, clock, 60)
    assert (live(deployment), expects()) == (1, Availability.COMING)


def test_every_worker_costs_from_its_launch_to_its_end(reconciler, launcher, clock, front, deployment):
    Price.objects.update_or_create(gpu_type="", defaults={"price_per_hour": 36.0})
    start_deployment(deployment, "tester")
    passes(reconciler, launcher, clock, 10)
    change_deployment(deployment, "tester", engine_options={"max_num_seqs": 8})
    passes(reconciler, launcher, clock, 20, ready=False)  # the successor starts while the first one serves
    deployment.refresh_from_db()
    assert (deployment.price_per_hour, deployment.cost) == (72.0, pytest.approx(0.1 + 0.4, abs=0.02))
    launcher.workers[1].fail(ExitStatus.MODEL_REFUSED, "no")
    passes(reconciler, launcher, clock, 20)  # the change has failed, and the first one serves on
    deployment.refresh_from_db()
    assert (deployment.price_per_hour, deployment.cost) == (36.0, pytest.approx(0.7, abs=0.02))
    stop_deployment(deployment, "tester")
    passes(reconciler, launcher, clock, 10)
    deployment.refresh_from_db()
    assert (deployment.price_per_hour, deployment.cost) == (0.0, pytest.approx(0.7, abs=0.02))


def test_a_failed_deployment_has_no_price(reconciler, launcher, clock, front, deployment):
    Price.objects.update_or_create(gpu_type="", defaults={"price_per_hour": 36.0})
    start_deployment(deployment, "tester")
    passes(reconciler, launcher, clock, 10, ready=False)
    launcher.workers[0].fail(ExitStatus.MODEL_REFUSED, "no")
    passes(reconciler, launcher, clock, 2)
    deployment.refresh_from_db()
    assert (deployment.state, deployment.price_per_hour) == ("failed", 0.0)


def test_an_unknown_price_counts_as_too_high(reconciler, launcher, clock, front, deployment):
    scalable(deployment, max_price_per_hour=100.0, gpu_type="Z9000")
    start_deployment(deployment, "tester")
    passes(reconciler, launcher, clock, 5)
    assert launcher.workers == []


def test_a_worker_that_never_becomes_ready_is_ended(reconciler, launcher, clock, front, deployment):
    scalable(deployment, start_timeout_s=30)
    start_deployment(deployment, "tester")
    passes(reconciler, launcher, clock, 40, ready=False)
    deployment.refresh_from_db()
    assert (deployment.state, deployment.reason) == ("failed", scaling.FAILURES["start_timeout"])
    assert reconciler.holder.current.deployments[0].availability == "failed"


def test_a_deleted_deployment_becomes_a_record(reconciler, launcher, clock, front, deployment):
    start_deployment(deployment, "tester")
    passes(reconciler, launcher, clock, 2)
    assert delete_deployment(deployment, "tester")
    assert not delete_deployment(deployment, "tester")
    deployment.refresh_from_db()
    assert deployment.current_state == "deleting"
    passes(reconciler, launcher, clock, 3)
    deployment.refresh_from_db()
    assert deployment.state == "deleted"
    assert deployment.ended_at is not None
    with pytest.raises(RegistryConflict):
        start_deployment(deployment, "tester")


def test_scaling_up_by_hand(reconciler, launcher, clock, front, deployment):
    scalable(deployment, max_workers=2)
    assert scale_up(deployment, "tester")
    assert not scale_up(deployment, "tester")  # it starts already
    passes(reconciler, launcher, clock, 2)
    assert scale_up(deployment, "tester")
    passes(reconciler, launcher, clock, 2)
    assert live(deployment) == 2
    with pytest.raises(RegistryConflict, match="max_workers"):
        scale_up(deployment, "tester")


def test_each_call_for_more_workers_adds_its_own(reconciler, launcher, clock, front, deployment):
    """Also before the reconciler has seen the one before."""
    scalable(deployment, max_workers=4)
    start_deployment(deployment, "tester")
    passes(reconciler, launcher, clock, 2)
    assert scale_up(deployment, "tester")
    assert scale_up(deployment, "tester", workers=2)
    with pytest.raises(RegistryConflict, match="has 4 of at most 4 workers"):
        scale_up(deployment, "tester")
    passes(reconciler, launcher, clock, 2)
    assert live(deployment) == 4


def test_limits_keep_the_number_that_was_asked_for_a_moment_before(reconciler, launcher, clock, front, deployment):
    scalable(deployment, max_workers=4)
    start_deployment(deployment, "tester")
    passes(reconciler, launcher, clock, 2)
    start_deployment(deployment, "tester", replicas=3)
    set_workers(deployment, "tester", 1, 4)
    passes(reconciler, launcher, clock, 2)
    assert live(deployment) == 3


def test_limits_keep_what_a_request_has_woken_as_it_starts(reconciler, launcher, clock, front, deployment):
    scalable(deployment, scale_to_zero=True)
    front.gauges = LoadGauges(held=1)
    passes(reconciler, launcher, clock, 2, ready=False)
    assert len(launcher.workers) == 1
    front.gauges = LoadGauges()
    set_workers(deployment, "tester", 0, 4)
    passes(reconciler, launcher, clock, 2)
    assert live(deployment) == 1


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"min_workers": 5, "max_workers": 2}, "max_workers"),
        ({"upper_threshold": 0.2}, "lower_threshold"),
        ({"min_workers": 1, "scale_to_zero": True}, "scale_to_zero"),
        ({"max_price_per_hour": -1.0}, "max_price_per_hour"),
        ({"strategy": "moon_phase"}, "strategy"),
        ({"up_window_s": 0}, "up_window_s"),
        ({"min_throughput_rate": 2.0, "min_workers": 1}, "min_throughput_rate"),
        ({"engine_options": {"max_num_seqs": 0}}, "max_num_seqs"),
    ],
)
def test_what_cannot_be_is_refused_by_name_and_changes_nothing(deployment, fields, named):
    before = Deployment.objects.values().get(pk=deployment.pk)
    with pytest.raises(RegistryError) as refused:
        change_deployment(deployment, "tester", **fields)
    assert named in refused.value.fields
    assert Deployment.objects.values().get(pk=deployment.pk) == before
