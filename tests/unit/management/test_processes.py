"""The reconciler over real processes of the local launcher: fake workers that serve, crash, hang or refuse their model."""

from __future__ import annotations

import asyncio
import os
import signal
import sys

import psutil
import pytest

from engine.client import EngineClient
from engine.sampling.params import SamplingParams
from management import watched
from management.launchers import local
from management.launchers.local import LocalLauncher
from management.models import Worker
from management.reconcile import Reconciler
from management.services.deployments import create_deployment, start_deployment, stop_deployment
from management.services.models import register_model
from management.snapshot import SnapshotHolder
from tests.waiting import wait_until


@pytest.fixture(autouse=True)
def fake_workers(monkeypatch):
    monkeypatch.setattr(local, "COMMAND", (sys.executable, "-m", "tests.unit.fake_worker"))
    monkeypatch.setattr(watched, "FIRST_PAUSE_S", 0.0)


@pytest.fixture
def reconciler(db):
    launcher = LocalLauncher()
    made = Reconciler(launcher, SnapshotHolder(), "")
    yield made
    launcher.close()


def started(kind: str, replicas: int = 1):
    deployment = create_deployment("demo", register_model("demo", f"/models/{kind}", "tester"), "tester")
    start_deployment(deployment, "tester", replicas)
    return deployment


def until(reconciler, deployment, *states: str) -> None:
    """Pass after pass until the deployment is in one of these states."""

    def there() -> bool:
        reconciler.reconcile_once()
        deployment.refresh_from_db()
        return deployment.state in states

    wait_until(there, 60, lambda: f"{deployment.state}: {deployment.reason}")


def entries(reconciler):
    return reconciler.holder.current.deployments[0].workers


async def generated(entry) -> list[int]:
    client = EngineClient(entry.address, entry.worker_id, entry.epoch)
    await client.connect()
    tokens = [t async for output in client.generate([5, 6], SamplingParams(max_tokens=9)) for t in output.token_ids]
    await client.close()
    return tokens


def test_workers_serve_until_they_are_stopped(reconciler):
    deployment = started("serves", replicas=2)
    wait_until(lambda: reconciler.reconcile_once() or (entries(reconciler) and len(entries(reconciler)) == 2), 30)
    first, second = entries(reconciler)
    assert (first.worker_id, second.worker_id) == ("demo/0", "demo/1")
    assert asyncio.run(generated(first)) == asyncio.run(generated(second)) == [5, 6, 2]
    processes = [psutil.Process(watched.handle.process_id) for watched in reconciler.watched.values()]
    stop_deployment(deployment, "tester")
    wait_until(lambda: reconciler.reconcile_once() or not reconciler.watched)
    until(reconciler, deployment, "inactive")
    assert not any(process.is_running() for process in processes)
    assert set(Worker.objects.values_list("state", "reason")) == {("exited", "stopped")}


def test_a_killed_worker_is_replaced(reconciler):
    deployment = started("serves")
    until(reconciler, deployment, "active")
    (entry,) = entries(reconciler)
    (watched,) = reconciler.watched.values()
    os.kill(watched.handle.process_id, signal.SIGKILL)
    until(reconciler, deployment, "provisioning")
    until(reconciler, deployment, "active")
    (replaced,) = entries(reconciler)
    assert (replaced.worker_id, replaced.epoch) == ("demo/0", entry.epoch + 1)
    assert replaced.address != entry.address
    assert Worker.objects.get(epoch=entry.epoch).reason == "killed by signal 9"


def test_a_model_that_is_refused_is_not_tried_again(reconciler):
    deployment = started("refused")
    until(reconciler, deployment, "failed")
    assert deployment.reason == "this model is none"
    assert Worker.objects.count() == 1


def test_a_model_that_ends_its_process_is_given_up(reconciler):
    deployment = started("crashes")
    until(reconciler, deployment, "failed")
    assert "SIGSEGV" in deployment.reason
    assert Worker.objects.count() == 1


def test_a_worker_that_hangs_is_killed_and_replaced(reconciler):
    deployment = started("hangs")
    wait_until(lambda: reconciler.reconcile_once() or Worker.objects.count() == 2)
    first = Worker.objects.get(epoch=1)
    assert (first.state, first.reason) == ("failed", "hung while computing a step, for 100 s")
    assert not psutil.pid_exists(first.process_id)
    stop_deployment(deployment, "tester")


def test_workers_end_with_their_launcher(reconciler):
    until(reconciler, started("serves"), "active")
    (watched,) = reconciler.watched.values()
    process = psutil.Process(watched.handle.process_id)
    watched.handle._lifeline.close()
    process.wait(60)
    assert watched.handle.exit_code() == 0
