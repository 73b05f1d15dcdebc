"""Workers of another version or with other options are replaced, and what the snapshot says of them meanwhile."""

from __future__ import annotations

import pytest

from management.models import Worker
from management.services.deployments import change_deployment, start_deployment, stop_deployment
from management.services.models import register_model
from management.services.snapshots import read_ready_workers


def running(reconciler, launcher, deployment, count, **fields):
    """The deployment with so many ready workers."""
    change_deployment(deployment, "tester", max_workers=count, **fields)
    start_deployment(deployment, "tester", replicas=count)
    reconciler.reconcile_once()
    launcher.workers[-1].ready()
    for worker in launcher.workers[:-1]:
        worker.ready()
    reconciler.reconcile_once()


def published(reconciler):
    (entry,) = reconciler.holder.current.deployments
    return entry.version, sorted(worker.worker_id for worker in entry.workers)


def test_a_snapshot_says_which_model_version_a_worker_serves(reconciler, launcher, deployment):
    start_deployment(deployment, "tester", replicas=2)
    reconciler.reconcile_once()
    for worker in launcher.workers:
        worker.ready()
    reconciler.reconcile_once()
    workers = reconciler.holder.current.deployments[0].workers
    assert [worker.model_version for worker in workers] == [deployment.version_id] * 2


def test_a_change_replaces_the_worker_once_the_new_one_is_ready(reconciler, launcher, deployment):
    start_deployment(deployment, "tester")
    reconciler.reconcile_once()
    launcher.workers[0].ready()
    reconciler.reconcile_once()
    newer = register_model("demo", "/models/newer", "tester")
    change_deployment(deployment, "tester", version=newer, engine_options={"max_num_seqs": 3})
    reconciler.reconcile_once()
    assert (launcher.workers[1].config.model, launcher.workers[1].config.max_num_seqs) == ("/models/newer", 3)
    assert reconciler.holder.current.deployments[0].version == 1  # what runs is what is told
    assert not launcher.workers[0].drained
    launcher.workers[1].ready()
    reconciler.reconcile_once()
    assert reconciler.holder.current.deployments[0].version == 2
    assert launcher.workers[0].drained
    assert len(launcher.workers) == 2


def test_requests_get_the_version_that_most_workers_have(reconciler, launcher, deployment):
    running(reconciler, launcher, deployment, 3)
    change_deployment(deployment, "tester", version=register_model("demo", "/models/newer", "tester"))
    told = [published(reconciler)]
    for number in (3, 4, 5):
        reconciler.reconcile_once()
        launcher.workers[number].ready()
        reconciler.reconcile_once()
        told.append(published(reconciler))
    assert told[0] == (1, ["demo/0", "demo/1", "demo/2"])
    assert [(version, len(workers)) for version, workers in told[1:]] == [(1, 2), (2, 2), (2, 3)]
    assert reconciler.scalers[deployment.pk].memory.target == 3


def test_a_version_that_cannot_be_served_leaves_the_old_workers_alone(reconciler, launcher, deployment):
    running(reconciler, launcher, deployment, 2)
    change_deployment(deployment, "tester", version=register_model("demo", "/models/bad", "tester"))
    reconciler.reconcile_once()
    launcher.workers[2].fail(3, "config.json is missing")
    for _ in range(3):
        reconciler.reconcile_once()
    deployment.refresh_from_db()
    assert (deployment.state, deployment.reason) == ("active", "config.json is missing")
    assert published(reconciler) == (1, ["demo/0", "demo/1"])
    assert len(launcher.workers) == 3
    stop_deployment(deployment, "tester")
    reconciler.reconcile_once()
    assert all(worker.drained for worker in launcher.workers[:2])


def with_spare(reconciler, launcher, deployment):
    """The deployment with one ready worker and a ready spare."""
    running(reconciler, launcher, deployment, 2, min_workers=1, fast_autoscaling=True)
    start_deployment(deployment, "tester", replicas=1)
    while not any(watched.spare for watched in reconciler.watched.values()):
        for worker in launcher.workers:
            worker.code = 0 if worker.drained else None
        reconciler.reconcile_once()
    launcher.workers[-1].ready()
    reconciler.reconcile_once()


def test_a_spare_is_replaced_before_the_worker_that_serves(reconciler, launcher, deployment):
    with_spare(reconciler, launcher, deployment)
    serving = [worker for worker in launcher.workers if not worker.drained]
    change_deployment(deployment, "tester", engine_options={"max_num_seqs": 5})
    reconciler.reconcile_once()
    assert [worker.drained for worker in serving] == [False, True]
    assert len(published(reconciler)[1]) == 1


@pytest.mark.parametrize(
    ("options", "same"),
    [
        ({"dtype": "float32"}, False),
        ({"quantization": "int8"}, False),
        ({"dtype": "auto"}, True),
        ({"max_num_seqs": 5}, True),
    ],
)
def test_workers_whose_options_change_outputs_are_of_another_kind(reconciler, launcher, deployment, options, same):
    running(reconciler, launcher, deployment, 1)
    (before,) = reconciler.holder.current.deployments[0].workers
    running(reconciler, launcher, deployment, 1, engine_options=options)
    (after,) = [w for w in reconciler.holder.current.deployments[0].workers if w != before]
    assert (before.kind == after.kind) == same


def changed(reconciler, launcher, deployment, **fields):
    """One ready worker, and then a change of its options, which needs a replacement."""
    running(reconciler, launcher, deployment, 1)
    change_deployment(deployment, "tester", engine_options={"max_num_seqs": 5}, **fields)
    reconciler.reconcile_once()


@pytest.mark.parametrize("asked", ["with the change", "during it"])
def test_a_higher_number_during_a_replacement_starts_as_many_as_are_missing(
    reconciler, launcher, deployment, clock, asked
):
    at_once = {"min_workers": 2, "max_workers": 2} if asked == "with the change" else {}
    changed(reconciler, launcher, deployment, **at_once)
    if not at_once:
        start_deployment(deployment, "tester", replicas=2)
    most = 0
    for _ in range(60):
        clock.now += 1
        for worker in launcher.workers:
            worker.beat()
        reconciler.reconcile_once()
        most = max(most, sum(not worker.drained for worker in launcher.workers))
    assert most == (2 if at_once else 3)
    while not launcher.workers[0].drained:
        for worker in launcher.workers[1:]:
            worker.ready()
        clock.now += 1
        reconciler.reconcile_once()
    for worker in launcher.workers[1:]:
        worker.ready()
    reconciler.reconcile_once()
    assert len(published(reconciler)[1]) == 2
    assert len(launcher.workers) == 3


def test_a_replacement_that_is_not_ready_in_time_is_ended(reconciler, launcher, deployment, clock):
    changed(reconciler, launcher, deployment)
    for _ in range(3):
        clock.now += deployment.start_timeout_s / 2 + 1
        for worker in launcher.workers:
            worker.beat()
        reconciler.reconcile_once()
    old, late, *_ = launcher.workers
    assert late.killed
    assert not old.drained
    deployment.refresh_from_db()
    reason = f"a replacement was not ready within {deployment.start_timeout_s:g} s"
    assert (deployment.state, deployment.reason) == ("active", reason)
    clock.now += 60
    old.beat()
    reconciler.reconcile_once()
    launcher.workers[-1].ready()
    reconciler.reconcile_once()
    assert old.drained
    old.code = 0
    for _ in range(2):
        reconciler.reconcile_once()
    deployment.refresh_from_db()
    assert (deployment.state, deployment.reason) == ("active", "")


def test_a_spare_takes_no_requests_in_other_processes(reconciler, launcher, deployment):
    with_spare(reconciler, launcher, deployment)
    (spare,) = [watched.worker for watched in reconciler.watched.values() if watched.spare]
    assert spare.state == "ready"
    assert spare.pk not in {worker.pk for worker in read_ready_workers()}
    adopted = reconciler.placement.adopt(Worker.objects.filter(pk=spare.pk).select_related("deployment"))
    assert [watched.spare for watched in adopted] == [True]
