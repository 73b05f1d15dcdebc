"""The reconciler goes on while the database refuses to be written, or to be read."""

from __future__ import annotations

import contextlib

import pytest
from django.db import OperationalError
from django.db.models import QuerySet

from management import ledger, watched
from management.models import Worker
from management.services.deployments import start_deployment


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch):
    monkeypatch.setattr(watched, "FIRST_PAUSE_S", 0.0)


def state(deployment):
    deployment.refresh_from_db()
    return deployment.state, deployment.reason


def refuse(*_: object, **__: object) -> None:
    raise OperationalError("database or disk is full")


@pytest.fixture
def full_disk(monkeypatch):
    """Rows are read and never written, until it is undone."""
    with monkeypatch.context() as patched:
        patched.setattr(Worker, "save", refuse)
        patched.setattr(QuerySet, "update", refuse)
        yield patched


@pytest.fixture
def no_database(monkeypatch):
    """Nothing is read and nothing written, until it is undone."""
    with monkeypatch.context() as patched:
        patched.setattr(ledger, "read_registries", refuse)
        patched.setattr(Worker, "save", refuse)
        patched.setattr(QuerySet, "update", refuse)
        yield patched


def pass_without_writing(reconciler):
    """What the two threads do while the database refuses."""
    for part in (reconciler.ledger.read, reconciler.step, reconciler.ledger.write):
        with contextlib.suppress(OperationalError):
            part()


def served_by(reconciler):
    (entry,) = reconciler.holder.current.deployments
    return [(worker.worker_id, worker.epoch) for worker in entry.workers]


@pytest.mark.parametrize("outage", ["full_disk", "no_database"])
def test_workers_are_replaced_while_nothing_can_be_written(outage, reconciler, launcher, deployment, request):
    start_deployment(deployment, "tester")
    reconciler.reconcile_once()
    launcher.workers[0].ready()
    reconciler.reconcile_once()
    undo = request.getfixturevalue(outage)
    for epoch in (2, 3):
        launcher.workers[-1].code = -9
        pass_without_writing(reconciler)
        assert served_by(reconciler) == []
        assert launcher.workers[-1].config.epoch == epoch
        launcher.workers[-1].ready()
        pass_without_writing(reconciler)
        assert served_by(reconciler) == [("demo/0", epoch)]
    assert Worker.objects.get().state == "ready"  # as far as the database knows
    undo.undo()
    reconciler.reconcile_once()
    assert list(Worker.objects.order_by("epoch").values_list("epoch", "state")) == [
        (1, "failed"), (2, "failed"), (3, "ready"),
    ]  # fmt: skip
    assert all(row.ended_at >= row.ready_at >= row.started_at for row in Worker.objects.filter(state="failed"))
    assert state(deployment)[0] == "active"


def test_a_failure_is_remembered_until_it_can_be_written(reconciler, launcher, deployment, request):
    start_deployment(deployment, "tester")
    reconciler.reconcile_once()
    full_disk = request.getfixturevalue("full_disk")
    launcher.workers[0].fail(3, "config.json is missing")
    for _ in range(3):
        pass_without_writing(reconciler)
    assert len(launcher.workers) == 1
    assert reconciler.failure() == ("demo", "config.json is missing")
    full_disk.undo()
    reconciler.reconcile_once()
    assert state(deployment) == ("failed", "config.json is missing")
    assert Worker.objects.get().state == "failed"
