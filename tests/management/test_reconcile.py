"""The reconciler: launches, restarts, gives up, drains, and says what it sees."""

from __future__ import annotations

import pytest
from django.db import OperationalError

from management import reconcile
from management.launchers.base import WorkerStatus
from management.models import Worker
from management.services.deployments import change_deployment, start_deployment, stop_deployment
from management.services.models import register_model


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch):
    monkeypatch.setattr(reconcile, "FIRST_PAUSE_S", 0.0)


def state(deployment):
    deployment.refresh_from_db()
    return deployment.state, deployment.reason


def test_it_works(reconciler, launcher, deployment):
    start_deployment(deployment, "tester")
    reconciler.reconcile_once()
    (worker,) = launcher.workers
    assert worker.config.model == "/models/demo"
    assert worker.config.epoch == 1
    assert state(deployment) == ("starting", "")
    assert reconciler.holder.current.deployments[0].workers == ()
    worker.ready()
    reconciler.reconcile_once()
    reconciler.reconcile_once()
    assert state(deployment) == ("ready", "")
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
    assert state(deployment)[0] == "starting"


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
    assert state(deployment) == ("starting", "")


def test_a_crash_loop_is_given_up(reconciler, launcher, deployment):
    start_deployment(deployment, "tester")
    for _ in range(20):
        reconciler.reconcile_once()
        launcher.workers[-1].code = 1
    assert len(launcher.workers) == reconcile.MAX_CRASHES
    assert state(deployment) == ("failed", "5 crashes in a row, the last: exit status 1")


def test_pauses_grow(reconciler, launcher, deployment, monkeypatch):
    monkeypatch.setattr(reconcile, "FIRST_PAUSE_S", 100.0)
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
    passes(reconciler, clock, reconcile.HUNG_AFTER_S)
    assert not ready_worker.killed
    passes(reconciler, clock, 1)
    assert ready_worker.killed
    assert "no heartbeat" in Worker.objects.get(epoch=1).reason
    assert len(launcher.workers) == 2


def test_a_worker_in_a_long_step_is_left_alone(ready_worker, reconciler, clock):
    quiet = iter(range(1000))
    passes(
        reconciler, clock, 200, lambda: ready_worker.beat(doing="computing a step", quiet_s=next(quiet), patience_s=900)
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
    assert state(deployment) == ("starting", "reading the weights")
    launcher.workers[0].ready()
    reconciler.reconcile_once()
    assert state(deployment) == ("ready", "")


def test_stopping_drains(reconciler, launcher, deployment):
    start_deployment(deployment, "tester", replicas=2)
    reconciler.reconcile_once()
    for worker in launcher.workers:
        worker.ready()
    reconciler.reconcile_once()
    stop_deployment(deployment, "tester")
    reconciler.reconcile_once()
    assert all(w.drained for w in launcher.workers)
    assert state(deployment)[0] == "stopping"
    assert reconciler.holder.current.deployments == ()
    for worker in launcher.workers:
        worker.code = 0
    reconciler.reconcile_once()
    reconciler.reconcile_once()
    assert state(deployment)[0] == "stopped"
    assert set(Worker.objects.values_list("state", flat=True)) == {"exited"}


def test_a_stopped_failed_deployment_is_stopped(reconciler, launcher, deployment):
    start_deployment(deployment, "tester")
    reconciler.reconcile_once()
    launcher.workers[0].fail(3, "bad")
    reconciler.reconcile_once()
    stop_deployment(deployment, "tester")
    reconciler.reconcile_once()
    assert state(deployment)[0] == "stopped"


def test_a_change_takes_effect_with_the_next_start(reconciler, launcher, deployment):
    start_deployment(deployment, "tester")
    reconciler.reconcile_once()
    launcher.workers[0].ready()
    reconciler.reconcile_once()
    newer = register_model("demo", "/models/newer", "tester")
    change_deployment(deployment, newer, {"max_num_seqs": 3}, "tester")
    reconciler.reconcile_once()
    assert reconciler.holder.current.deployments[0].version == 1  # what runs is what is told
    assert not launcher.workers[0].drained
    start_deployment(deployment, "tester")
    reconciler.reconcile_once()
    assert launcher.workers[0].drained
    assert (launcher.workers[1].config.model, launcher.workers[1].config.max_num_seqs) == ("/models/newer", 3)
    launcher.workers[1].ready()
    reconciler.reconcile_once()
    assert reconciler.holder.current.deployments[0].version == 2


def test_a_database_that_is_away_for_a_moment_loses_nothing(reconciler, launcher, deployment, monkeypatch):
    start_deployment(deployment, "tester")
    reconciler.reconcile_once()
    launcher.workers[0].ready()
    save = Worker.save
    monkeypatch.setattr(Worker, "save", lambda *a, **k: (_ for _ in ()).throw(OperationalError("away")))
    with pytest.raises(OperationalError):
        reconciler.reconcile_once()
    monkeypatch.setattr(Worker, "save", save)
    reconciler.reconcile_once()
    reconciler.reconcile_once()
    assert Worker.objects.get().state == "ready"
    assert state(deployment)[0] == "ready"


def test_scaling_keeps_the_first_workers(reconciler, launcher, deployment):
    start_deployment(deployment, "tester", replicas=3)
    reconciler.reconcile_once()
    start_deployment(deployment, "tester", replicas=1)
    reconciler.reconcile_once()
    assert [w.drained for w in launcher.workers] == [False, True, True]


def test_workers_of_an_earlier_process_are_gone(reconciler, launcher, deployment):
    Worker.objects.create(
        deployment=deployment, version=deployment.version, index=0, epoch=7, state="ready", socket="x"
    )
    reconciler.forget_earlier_workers()
    start_deployment(deployment, "tester")
    reconciler.reconcile_once()
    assert launcher.workers[0].config.epoch == 8
    assert Worker.objects.get(epoch=7).state == "exited"
