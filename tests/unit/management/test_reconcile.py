"""The reconciler: launches, restarts, gives up, drains, and says what it sees."""

from __future__ import annotations

import errno
import signal
import time

import pytest

from management import reconcile, watched
from management.launchers.base import WorkerStatus
from management.launchers.cpus import threads_of
from management.models import Worker
from management.services.deployments import create_deployment, start_deployment, stop_deployment
from management.services.models import register_model


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch):
    monkeypatch.setattr(watched, "FIRST_PAUSE_S", 0.0)


def state(deployment):
    deployment.refresh_from_db()
    return deployment.state, deployment.reason


def test_it_works(reconciler, launcher, deployment):
    start_deployment(deployment, "tester")
    reconciler.reconcile_once()
    (worker,) = launcher.workers
    assert worker.config.model == "/models/demo"
    assert worker.config.epoch == 1
    assert state(deployment) == ("provisioning", "")
    assert reconciler.holder.current.deployments[0].workers == ()
    worker.ready()
    reconciler.reconcile_once()
    reconciler.reconcile_once()
    assert state(deployment) == ("active", "")
    (entry,) = reconciler.holder.current.deployments[0].workers
    assert (entry.worker_id, entry.epoch) == ("demo/0", 1)


def test_a_crash_brings_a_new_epoch(reconciler, launcher, deployment):
    start_deployment(deployment, "tester")
    reconciler.reconcile_once()
    launcher.workers[0].ready()
    reconciler.reconcile_once()
    launcher.workers[0].code = -9
    reconciler.reconcile_once()
    assert [w.config.epoch for w in launcher.workers] == [1, 2]
    assert Worker.objects.get(epoch=1).reason == "killed by signal 9"
    assert state(deployment)[0] == "provisioning"


def test_an_unservable_model_fails_at_once_and_start_tries_again(reconciler, launcher, deployment):
    start_deployment(deployment, "tester")
    reconciler.reconcile_once()
    launcher.workers[0].fail(3, "config.json is missing")
    for _ in range(3):
        reconciler.reconcile_once()
    assert len(launcher.workers) == 1
    assert state(deployment) == ("failed", "config.json is missing")
    start_deployment(deployment, "tester")
    reconciler.reconcile_once()
    assert len(launcher.workers) == 2
    assert state(deployment) == ("provisioning", "")


def test_a_crash_loop_is_given_up(reconciler, launcher, deployment):
    start_deployment(deployment, "tester")
    for _ in range(20):
        reconciler.reconcile_once()
        launcher.workers[-1].code = 1
    assert len(launcher.workers) == watched.MAX_CRASHES
    assert state(deployment) == ("failed", "5 crashes in a row, the last: exit status 1")


def test_crashes_between_served_requests_are_no_loop(reconciler, launcher, deployment, monkeypatch):
    monkeypatch.setattr(reconcile, "last_served_at", lambda scaler: time.monotonic())
    start_deployment(deployment, "tester")
    for _ in range(20):
        reconciler.reconcile_once()
        launcher.workers[-1].code = 1
    assert len(launcher.workers) == 20
    assert state(deployment)[0] == "provisioning"


def test_pauses_grow(reconciler, launcher, deployment, monkeypatch):
    monkeypatch.setattr(watched, "FIRST_PAUSE_S", 100.0)
    start_deployment(deployment, "tester")
    reconciler.reconcile_once()
    launcher.workers[0].code = 1
    for _ in range(5):
        reconciler.reconcile_once()
    assert len(launcher.workers) == 1


@pytest.fixture
def ready_worker(clock, reconciler, launcher, deployment):
    start_deployment(deployment, "tester")
    reconciler._last_pass = clock.now
    reconciler.reconcile_once()
    launcher.workers[0].ready()
    reconciler.reconcile_once()
    return launcher.workers[0]


def passes(reconciler, clock, seconds, beat=None):
    for _ in range(int(seconds * 4)):
        clock.now += 0.25
        if beat is not None:
            beat()
        reconciler.reconcile_once()


def test_a_silent_worker_is_killed(ready_worker, reconciler, launcher, clock):
    passes(reconciler, clock, watched.HUNG_AFTER_S)
    assert not ready_worker.killed
    passes(reconciler, clock, 1)
    assert ready_worker.killed
    assert "no heartbeat" in Worker.objects.get(epoch=1).reason
    assert len(launcher.workers) == 2


def test_a_worker_in_a_long_step_is_left_alone(ready_worker, reconciler, clock):
    quiet = iter(range(1000))
    passes(
        reconciler, clock, 60, lambda: ready_worker.beat(doing="computing a step", quiet_s=next(quiet), patience_s=900)
    )
    assert not ready_worker.killed


def test_a_worker_that_does_not_move_on_is_killed(ready_worker, reconciler, clock):
    ready_worker.beat(doing="computing a step", quiet_s=21, patience_s=20)
    passes(reconciler, clock, 1)
    assert ready_worker.killed
    assert Worker.objects.get(epoch=1).reason == "hung while computing a step, for 21 s"


def test_a_server_that_slept_kills_nobody_on_waking(ready_worker, reconciler, clock):
    passes(reconciler, clock, 5)
    clock.now += 3600
    reconciler.reconcile_once()
    assert not ready_worker.killed
    passes(reconciler, clock, 1, ready_worker.beat)
    assert not ready_worker.killed


def test_a_start_says_what_it_is_doing(reconciler, launcher, deployment):
    start_deployment(deployment, "tester")
    reconciler.reconcile_once()
    launcher.workers[0].reports.append(WorkerStatus("loading", doing="reading the weights"))
    reconciler.reconcile_once()
    assert state(deployment) == ("provisioning", "reading the weights")
    launcher.workers[0].ready()
    reconciler.reconcile_once()
    assert state(deployment) == ("active", "")


def test_stopping_drains(reconciler, launcher, deployment):
    start_deployment(deployment, "tester", replicas=2)
    reconciler.reconcile_once()
    for worker in launcher.workers:
        worker.ready()
    reconciler.reconcile_once()
    stop_deployment(deployment, "tester")
    reconciler.reconcile_once()
    assert all(w.drained for w in launcher.workers)
    assert state(deployment)[0] == "inactive"
    assert reconciler.holder.current.deployments == ()
    for worker in launcher.workers:
        worker.code = 0
    reconciler.reconcile_once()
    reconciler.reconcile_once()
    assert state(deployment)[0] == "inactive"
    assert set(Worker.objects.values_list("state", flat=True)) == {"exited"}


def test_a_drain_that_takes_too_long_becomes_a_hand_over_and_then_a_kill(ready_worker, reconciler, deployment, clock):
    stop_deployment(deployment, "tester")
    reconciler.reconcile_once()
    clock.now += deployment.drain_timeout_s
    reconciler.reconcile_once()
    assert (ready_worker.drained, ready_worker.handed_over) == (True, 0)
    clock.now += 1
    for _ in range(3):
        reconciler.reconcile_once()
    assert (ready_worker.handed_over, ready_worker.killed) == (3, False), "signals that arrive together are one"
    clock.now += watched.HAND_OVER_PATIENCE_S
    reconciler.reconcile_once()
    assert (ready_worker.handed_over, ready_worker.killed) == (3, True)


def test_a_stopped_failed_deployment_is_stopped(reconciler, launcher, deployment):
    start_deployment(deployment, "tester")
    reconciler.reconcile_once()
    launcher.workers[0].fail(3, "bad")
    reconciler.reconcile_once()
    stop_deployment(deployment, "tester")
    reconciler.reconcile_once()
    assert state(deployment)[0] == "inactive"


@pytest.mark.parametrize("signal_number", [signal.SIGSEGV, signal.SIGBUS, signal.SIGABRT, signal.SIGILL])
def test_a_model_that_ends_its_process_is_not_tried_again(signal_number, reconciler, launcher, deployment):
    start_deployment(deployment, "tester")
    reconciler.reconcile_once()
    launcher.workers[0].reports.append(WorkerStatus("loading"))
    launcher.workers[0].code = -signal_number
    for _ in range(5):
        reconciler.reconcile_once()
    assert len(launcher.workers) == 1
    reason = f"the worker was killed by {signal_number.name} while loading and verifying the model"
    assert state(deployment) == ("failed", reason)
    assert reconciler.failure() == ("demo", reason)


def test_a_fault_of_a_worker_that_served_brings_the_next(reconciler, launcher, deployment):
    start_deployment(deployment, "tester")
    reconciler.reconcile_once()
    launcher.workers[0].ready()
    reconciler.reconcile_once()
    launcher.workers[0].code = -signal.SIGSEGV
    reconciler.reconcile_once()
    assert [w.config.epoch for w in launcher.workers] == [1, 2]


def test_a_model_that_has_its_workers_killed_is_tried_twice(reconciler, launcher, deployment):
    start_deployment(deployment, "tester")
    for _ in range(5):
        reconciler.reconcile_once()
        launcher.workers[-1].code = -signal.SIGKILL
    assert len(launcher.workers) == 2
    assert state(deployment)[0] == "failed"
    assert "enough memory" in state(deployment)[1]


def test_a_launch_that_fails_leaves_no_row_and_is_tried_again(reconciler, launcher, deployment):
    start_deployment(deployment, "tester")
    launcher.error = OSError(errno.EAGAIN, "Resource temporarily unavailable")
    for _ in range(2 * watched.MAX_CRASHES):
        reconciler.reconcile_once()
    assert not Worker.objects.exists()
    assert state(deployment) == ("provisioning", "a worker could not be launched: Resource temporarily unavailable")
    launcher.error = None
    reconciler.reconcile_once()
    launcher.workers[0].ready()
    reconciler.reconcile_once()
    assert state(deployment) == ("active", "")


def test_options_that_no_engine_takes_fail_the_deployment(reconciler, launcher, deployment):
    start_deployment(deployment, "tester")
    type(deployment).objects.update(engine_options={"an_older_option": 1})
    for _ in range(3):
        reconciler.reconcile_once()
    assert not launcher.workers
    assert not Worker.objects.exists()
    assert state(deployment)[0] == "failed"
    assert "an_older_option" in state(deployment)[1]


def test_workers_of_a_deployment_that_is_gone_are_drained(reconciler, launcher, deployment):
    start_deployment(deployment, "tester")
    reconciler.reconcile_once()
    deployment.delete()
    reconciler.reconcile_once()
    assert launcher.workers[0].drained
    launcher.workers[0].code = 0
    reconciler.reconcile_once()
    assert reconciler.watched == {}
    assert not Worker.objects.exists()


def test_scaling_keeps_the_first_workers(reconciler, launcher, deployment):
    start_deployment(deployment, "tester", replicas=3)
    reconciler.reconcile_once()
    start_deployment(deployment, "tester", replicas=1)
    reconciler.reconcile_once()
    assert [w.drained for w in launcher.workers] == [False, True, True]


def test_workers_of_an_earlier_process_are_gone(reconciler, launcher, deployment):
    Worker.objects.create(
        deployment=deployment, version=deployment.version, index=0, epoch=7, state="ready", address="x"
    )
    reconciler.ledger.forget_earlier_workers()
    start_deployment(deployment, "tester")
    reconciler.reconcile_once()
    assert launcher.workers[0].config.epoch == 8
    assert Worker.objects.get(epoch=7).state == "exited"


@pytest.mark.parametrize(
    ("workers", "cpus", "threads"), [(0, 8, 0), (1, 8, 0), (2, 8, 4), (3, 8, 2), (9, 8, 1), (2, 1, 1), (2, 4096, 1024)]
)
def test_workers_on_one_host_share_its_cpus(workers, cpus, threads):
    assert threads_of(workers, cpus) == threads


def test_a_launch_divides_the_cpus_among_all_workers(reconciler, launcher, deployment, monkeypatch):
    monkeypatch.setattr(launcher, "threads", lambda workers: threads_of(workers, 12))
    other = create_deployment("other", register_model("other", "/models/other", "tester"), "tester")
    start_deployment(deployment, "tester", replicas=2)
    reconciler.reconcile_once()
    assert [w.config.threads for w in launcher.workers] == [6, 6]
    start_deployment(other, "tester")
    reconciler.reconcile_once()
    assert [w.config.threads for w in launcher.workers] == [6, 6, 4]


def test_the_only_worker_counts_the_cpus_itself(reconciler, launcher, deployment):
    start_deployment(deployment, "tester")
    reconciler.reconcile_once()
    assert launcher.workers[0].config.threads == 0


def test_a_deployments_own_number_of_threads_stays(reconciler, launcher):
    version = register_model("demo", "/models/demo", "tester")
    start_deployment(create_deployment("demo", version, "tester", {"threads": 3}), "tester", replicas=2)
    reconciler.reconcile_once()
    assert [w.config.threads for w in launcher.workers] == [3, 3]


def test_the_row_of_a_ready_worker_says_that_it_is_silent(reconciler, launcher, deployment, clock):
    start_deployment(deployment, "tester")
    reconciler.reconcile_once()
    launcher.workers[0].ready()
    reconciler.reconcile_once()
    for _ in range(4):
        clock.now += 1.0
        reconciler.reconcile_once()
    row = Worker.objects.get()
    assert (row.state, row.reason) == (Worker.State.READY, watched.SILENT)
    launcher.workers[0].beat()
    reconciler.reconcile_once()
    row.refresh_from_db()
    assert (row.state, row.reason) == (Worker.State.READY, "")
