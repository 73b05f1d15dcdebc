"""A reconciler that leads by a lease: what it does with the workers when the database is away, and when others lead."""

from __future__ import annotations

import contextlib
import threading

import pytest
from django.db import OperationalError

from management import leadership as leadership_module
from management import ledger as ledger_module
from management.leadership import ACT_FOR_S, RENEW_AFTER_S, Leadership, LeadershipLost
from management.models import LeaderLease, Worker
from management.reconcile import Reconciler
from management.services.deployments import set_workers, start_deployment
from management.snapshot import SnapshotHolder


@pytest.fixture
def clock(clock, monkeypatch):
    monkeypatch.setattr(leadership_module, "time", clock)
    return clock


@pytest.fixture
def leader(launcher, clock, deployment):
    """A reconciler that leads, with one ready worker."""
    start_deployment(deployment, "tester")
    made = leading(launcher)
    both_threads(made)
    launcher.workers[0].ready()
    both_threads(made)
    assert served_by(made) == [("demo/0", 1)]
    return made


def leading(launcher):
    made = Reconciler(launcher, SnapshotHolder(), "")
    made.ledger.leadership = Leadership()
    return made


def both_threads(reconciler):
    """What the two threads do once."""
    ledger = reconciler.ledger
    for part in (ledger.campaign, ledger.read, reconciler.step, ledger.write):
        with contextlib.suppress(OperationalError):
            part()


def served_by(reconciler):
    (entry,) = reconciler.holder.current.deployments
    return [(worker.worker_id, worker.epoch) for worker in entry.workers]


@pytest.fixture
def no_database(monkeypatch):
    """The database is away, until it is undone."""

    def refuse(*_: object) -> None:
        raise OperationalError("the connection is lost")

    with monkeypatch.context() as patched:
        patched.setattr(Leadership, "campaign", refuse)
        patched.setattr(Leadership, "fence", refuse)
        patched.setattr(ledger_module, "read_registries", refuse)
        yield patched


def test_workers_keep_their_leases_while_the_database_is_away(leader, launcher, clock, deployment, request):
    (worker,) = launcher.workers
    outage = request.getfixturevalue("no_database")
    for _ in range(10):
        before = len(worker.renewals)
        clock.now += ACT_FOR_S
        both_threads(leader)
        assert len(worker.renewals) > before
    assert set(worker.renewals) == {1}
    assert not worker.released
    outage.undo()
    LeaderLease.objects.update(expires_at=0.0)  # it ran out meanwhile, and nobody took it
    both_threads(leader)
    assert worker.renewals[-1] == 2
    assert served_by(leader) == [("demo/0", 1)]
    assert len(launcher.workers) == 1


def test_a_short_outage_changes_nothing(leader, launcher, clock, request):
    """Longer than a leader may act, and shorter than its lease."""
    (worker,) = launcher.workers
    outage = request.getfixturevalue("no_database")
    clock.now += ACT_FOR_S
    both_threads(leader)
    outage.undo()
    both_threads(leader)
    assert (worker.released, worker.renewals[-1]) == (False, 1)
    assert served_by(leader) == [("demo/0", 1)]
    assert len(launcher.workers) == 1


def test_who_cannot_reach_the_database_launches_and_ends_nothing(leader, launcher, clock, deployment, request):
    (worker,) = launcher.workers
    set_workers(deployment, "tester", 3, 3)
    leader.ledger.read()
    request.getfixturevalue("no_database")
    clock.now += ACT_FOR_S
    worker.code = -9
    for _ in range(3):
        both_threads(leader)
    assert len(launcher.workers) == 1


def test_who_hears_of_another_leader_lets_go(leader, launcher, clock):
    LeaderLease.objects.update(holder="elsewhere:1:space:chance", epoch=2)
    clock.now += RENEW_AFTER_S
    both_threads(leader)
    assert launcher.workers[0].released
    assert not leader.watched


def test_a_take_over_whose_reading_fails_is_finished_later(leader, launcher, clock, monkeypatch):
    LeaderLease.objects.update(expires_at=0.0)
    second = leading(launcher)
    with monkeypatch.context() as patched:
        patched.setattr(ledger_module.Ledger, "_continue_epochs", _lost)
        both_threads(second)
        assert not second.watched
    both_threads(second)
    assert [watched.worker.worker_id for watched in second.watched.values()] == ["demo/0"]
    assert launcher.workers[0].renewals[-1] == 2


def _lost(_: object) -> None:
    raise OperationalError("the connection is lost")


def test_a_later_epoch_adopts_what_there_is_now(leader, launcher, clock, deployment):
    """Not what there was when this process first began to lead, which was nothing."""
    LeaderLease.objects.update(expires_at=0.0)
    clock.now += ACT_FOR_S
    leader.step()
    leader.ledger.leadership.campaign()
    leader.step()  # before the rows are read
    assert len(launcher.workers) == 1
    assert Worker.objects.filter(state=Worker.State.READY).count() == 1
    both_threads(leader)
    assert launcher.workers[0].renewals[-1] == 2
    assert len(launcher.workers) == 1


def test_workers_are_taken_over_all_at_once(leader, launcher, clock, deployment, monkeypatch):
    """A host that is away answers after seconds, which must not add up to the leases of the others."""
    set_workers(deployment, "tester", 4, 4)
    both_threads(leader)
    assert len(launcher.workers) == 4
    LeaderLease.objects.update(expires_at=0.0)
    together, adopt = threading.Barrier(4), launcher.adopt

    def wait_and_adopt(address, name):
        together.wait(60)
        return adopt(address, name)

    monkeypatch.setattr(launcher, "adopt", wait_and_adopt)
    second = leading(launcher)
    both_threads(second)
    assert len(second.watched) == 4


def test_a_process_that_acts_alone_stops_when_another_has_its_lease(launcher, clock, deployment):
    """It was suspended for longer than the lease: the other one has its own workers for the same rows."""
    made = Reconciler(launcher, SnapshotHolder(), "")
    standing = made.ledger.standing = Leadership()
    assert standing.campaign()
    start_deployment(deployment, "tester")
    both_threads(made)
    assert len(launcher.workers) == 1
    LeaderLease.objects.update(expires_at=0.0)
    assert Leadership().campaign()
    set_workers(deployment, "tester", 2, 2)
    made.ledger.note(next(iter(made.watched.values())).worker, "state")
    clock.now += RENEW_AFTER_S
    for _ in range(2):
        made.ledger.campaign()
        assert made.ledger.displaced
        made.ledger.read()
        made.step()
        assert len(launcher.workers) == 1
        with pytest.raises(LeadershipLost):
            made.ledger.write()
        LeaderLease.objects.update(expires_at=0.0)  # the other one has gone; its workers' rows are not this process's


def test_a_launch_that_fails_leaves_no_worker_that_seems_to_start(leader, launcher, clock, deployment):
    launcher.error = OSError("no processes are left")
    set_workers(deployment, "tester", 2, 2)
    for _ in range(3):
        clock.now += RENEW_AFTER_S
        both_threads(leader)
    states = list(Worker.objects.order_by("index", "epoch").values_list("index", "state", "reason"))
    assert states[0][:2] == (0, "ready")
    assert states[1:] == [(1, "failed", "no processes are left")] * (len(states) - 1)
    assert len(states) > 1
