"""A launcher that chooses machines: what the reconciler makes of an address that comes later, of prices, and of machines that leave."""

from __future__ import annotations

import pytest

from management.launchers.base import WorkerStatus
from management.models import Price, Worker
from management.services.deployments import change_deployment, start_deployment


@pytest.fixture
def placing(launcher, monkeypatch):
    """The fake launcher, as one that knows no addresses."""
    monkeypatch.setattr(launcher, "address", lambda name: "")
    monkeypatch.setattr(launcher, "threads", lambda workers: 1)
    return launcher


def place(worker, number: int = 1, **labels: str) -> None:
    worker.reports.append(
        WorkerStatus(
            "loading", doing="starting", address=f"tcp://host-{number}:21000", node=f"host-{number}", labels=labels
        )
    )


def test_a_worker_is_reached_where_it_was_placed(reconciler, placing, deployment):
    start_deployment(deployment, "tester")
    reconciler.reconcile_once()
    (worker,) = placing.workers
    worker.reports.append(WorkerStatus("loading", doing="waiting for a machine"))
    reconciler.reconcile_once()
    row = Worker.objects.get()
    assert (row.address, row.node, row.reason) == ("", "", "waiting for a machine")
    assert (worker.config.address, worker.config.threads) == ("", 1)
    place(worker)
    worker.ready()
    reconciler.reconcile_once()
    row.refresh_from_db()
    assert (row.address, row.node, row.state) == ("tcp://host-1:21000", "host-1", "ready")
    (entry,) = reconciler.holder.current.deployments[0].workers
    assert entry.address == "tcp://host-1:21000"


def test_a_worker_costs_what_its_machine_costs(reconciler, placing, deployment, clock):
    Price.objects.all().delete()
    Price.objects.create(gpu_type="", price_per_hour=0.5)
    Price.objects.create(gpu_type="", spot=True, price_per_hour=0.125)
    change_deployment(deployment, "tester", spot=True, max_price_per_hour=0.625, min_workers=3, max_workers=3)
    start_deployment(deployment, "tester", replicas=3)
    reconciler.reconcile_once()
    first, second = (
        placing.workers
    )  # the first may become one of 0.5, so the second must be a spot machine, and a third waits
    assert placing.places == [({"market": "spot"}, {"market": "!spot"}), ({"market": "spot"},), ()]
    place(first, market="spot")
    reconciler.reconcile_once()
    assert Worker.objects.get(index=0).price_per_hour == 0.125
    clock.now += 60
    place(second, market="spot")
    reconciler.reconcile_once()
    assert len(placing.workers) == 3
    assert placing.places[-1] == ({"market": "spot"},)


def test_a_machine_that_leaves_is_left_when_the_successor_is_ready(reconciler, placing, deployment):
    start_deployment(deployment, "tester")
    reconciler.reconcile_once()
    (old,) = placing.workers
    place(old)
    old.ready()
    reconciler.reconcile_once()
    old.beat(leaves_in_s=30.0)
    reconciler.reconcile_once()
    reconciler.reconcile_once()
    assert len(placing.workers) == 2
    assert not old.drained
    new = placing.workers[1]
    place(new, 2)
    new.ready()
    reconciler.reconcile_once()
    reconciler.reconcile_once()
    assert old.drained
    assert not old.handed_over
    (entry,) = reconciler.holder.current.deployments[0].workers
    assert entry.address == "tcp://host-2:21000"


def test_a_machine_that_leaves_before_that_hands_its_requests_over_in_time(reconciler, placing, deployment, clock):
    start_deployment(deployment, "tester")
    reconciler.reconcile_once()
    (old,) = placing.workers
    place(old)
    old.ready()
    reconciler.reconcile_once()
    old.beat(leaves_in_s=30.0)
    reconciler.reconcile_once()
    told_at = clock.now
    seen = {}
    while clock.now < told_at + 35 and not old.killed:
        clock.now += 1.0
        old.beat()
        reconciler.reconcile_once()
        for what in ("drained", "handed_over", "killed"):
            if getattr(old, what):
                seen.setdefault(what, clock.now - told_at)
    assert len(placing.workers) == 2
    assert 20 <= seen["drained"] <= 22
    assert 25 <= seen["handed_over"] <= 27
    assert 30 <= seen["killed"] <= 32
