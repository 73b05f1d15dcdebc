"""The registry as the data plane uses it."""

from __future__ import annotations

import asyncio
import threading

import pytest

from config.management.commands import serve
from config.registry import DjangoRegistry
from inference.workers.registry import NewDeployment
from management.ledger import Observed
from management.models import Deployment
from management.services.deployments import create_deployment, delete_deployment
from management.services.models import register_model


async def test_short_calls_do_not_wait_for_creations(monkeypatch):
    copied = threading.Event()
    monkeypatch.setattr(DjangoRegistry, "_create", lambda *_: copied.wait())
    monkeypatch.setattr(DjangoRegistry, "_deployments", lambda _: [])
    registry = DjangoRegistry(None, None)
    wanted = NewDeployment(["demo"], "demo")
    creations = [asyncio.ensure_future(registry.create_deployment(wanted, "tester")) for _ in range(8)]
    await asyncio.sleep(0)  # each has asked for a thread
    try:
        assert await registry.deployments() == []
    finally:
        copied.set()
        await asyncio.gather(*creations)


@pytest.mark.django_db
def test_a_deployment_that_is_deleted_as_it_is_started_is_not_there():
    row = create_deployment("demo", register_model("demo", "/models/demo", "tester"), "tester", replicas=1)

    class Control:
        """Looks at a deployment, which another client deletes meanwhile."""

        def observed(self, row):
            delete_deployment(row, "another")
            return Observed(row.generation, str(Deployment.State.FAILED), "")

    assert DjangoRegistry(Control(), None)._start(row.name, "tester") is False


@pytest.mark.django_db
def test_a_deployment_that_a_request_has_woken_runs_and_its_start_removes_no_worker(deployment):
    """A person stopped it before, so that none was asked for."""
    Deployment.objects.update(
        state="active", generation=3, asked_generation=2, observed_generation=3, target_workers=3, max_workers=3
    )

    class Control:
        """Knows what the rows say."""

        observed = staticmethod(Observed.of)

        def refresh(self):
            pass

    registry = DjangoRegistry(Control(), None)
    assert registry._start(deployment.name, "tester")
    (told,) = registry._deployments()
    assert (told.state, told.wanted_workers) == ("ready", 3)
    deployment.refresh_from_db()
    assert deployment.generation == 3


@pytest.mark.django_db
def test_another_default_that_a_request_has_woken_is_stopped_as_another_model_is_served(deployment):
    Deployment.objects.update(asked_generation=1, observed_generation=1, target_workers=1)
    serve.deploy("/models/other", find_adapters=False)
    deployment.refresh_from_db()
    assert (deployment.is_default, deployment.stopped) == (False, True)
