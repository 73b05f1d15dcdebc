"""The machines' capacity limits how many workers are started."""

from __future__ import annotations

import datetime
import os

import pytest
from django.utils import timezone

from management.models import Node, Worker
from management.services.deployments import change_deployment, create_deployment, start_deployment

NOW, LONG_AGO = datetime.timedelta(), datetime.timedelta(hours=1)


@pytest.mark.parametrize("starts_here", [True, False])
@pytest.mark.parametrize(("silent", "counted"), [(NOW, True), (LONG_AGO, False)])
def test_a_machine_counts_while_it_reports(reconciler, launcher, deployment, silent, counted, starts_here):
    """That of the reconciler always does: when it starts it has not reported for as long as it was away. The others' count where
    workers may start on them.
    """
    launcher.starts_here = starts_here
    Node.objects.create(name=os.uname().nodename, seen_at=timezone.now() - LONG_AGO, max_workers=2)
    Node.objects.create(name="other", seen_at=timezone.now() - silent, max_workers=1)
    change_deployment(deployment, "tester", max_workers=4)
    start_deployment(deployment, "tester", replicas=4)
    for _ in range(3):
        reconciler.reconcile_once()
    assert len(launcher.workers) == 2 + (counted and not starts_here)
    deployment.refresh_from_db()
    assert deployment.scale_blocked == "capacity"


@pytest.mark.parametrize(("state", "capacity"), [("ready", 3), ("exited", 2)])
def test_a_silent_machine_counts_while_it_has_workers(reconciler, deployment, state, capacity):
    Node.objects.create(name=os.uname().nodename, seen_at=timezone.now(), max_workers=2)
    Node.objects.create(name="other", seen_at=timezone.now() - LONG_AGO, max_workers=1)
    other = create_deployment("other", deployment.version, "tester")
    Worker.objects.create(
        deployment=other, version=other.version, index=0, epoch=1, state=state, address="x", node="other"
    )
    reconciler.ledger.read()
    assert sum(node.capacity for node in reconciler.ledger.registries.nodes) == capacity
