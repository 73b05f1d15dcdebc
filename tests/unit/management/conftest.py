"""Registries in a database of their own, and a launcher whose workers do as they are told."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest

from engine.process.cpus import usable_cpus
from management import placement, reconcile, scaling, watched
from management.launchers.base import WorkerStatus
from management.launchers.cpus import threads_of
from management.launchers.place import ANYWHERE
from management.reconcile import Reconciler
from management.services.deployments import create_deployment
from management.services.models import register_model
from management.snapshot import SnapshotHolder


@dataclass
class FakeWorker:
    config: object
    process_id: int = 4711
    reports: list[WorkerStatus] = field(default_factory=list)
    code: int | None = None
    drained: bool = False
    handed_over: int = 0
    killed: bool = False
    renewals: list[int] = field(default_factory=list)
    released: bool = False

    def statuses(self):
        reports, self.reports = self.reports, []
        return reports

    def exit_code(self):
        return self.code

    def drain(self):
        self.drained = True

    def hand_over(self):
        self.handed_over += 1

    def renew(self, epoch):
        self.renewals.append(epoch)

    def release(self):
        self.released = True

    def kill(self):
        self.killed, self.code = True, -9

    def ready(self):
        self.reports += [WorkerStatus("loading"), WorkerStatus("ready")]

    def beat(self, **details):
        self.reports.append(WorkerStatus("alive", **details))

    def fail(self, code, reason=""):
        self.reports.append(WorkerStatus("failed", reason))
        self.code = code


class FakeLauncher:
    starts_here = True

    def __init__(self):
        self.workers: list[FakeWorker] = []
        self.places: list[tuple[dict[str, str], ...]] = []
        self.error: OSError | None = None

    def launch(self, config, secrets=None, place=ANYWHERE):
        self.secrets = secrets
        self.places.append(place.choices)
        if not place.choices:
            raise OSError("no machine is allowed")
        if self.error is not None:
            raise self.error
        self.workers.append(FakeWorker(config))
        return self.workers[-1]

    def adopt(self, address, name):
        return next((w for w in self.workers if w.code is None and w.config.address == address), None)

    def threads(self, workers):
        return threads_of(workers, usable_cpus())

    def address(self, name):
        return f"unix:/nowhere/{name}.sock"

    def close(self):
        pass


@pytest.fixture
def launcher():
    return FakeLauncher()


@pytest.fixture
def clock(monkeypatch):
    """The reconciler's clock, which only the test moves."""

    class Clock:
        now = 1000.0

        def monotonic(self):
            return self.now

    moved = Clock()
    for module in (reconcile, watched, scaling, placement):
        monkeypatch.setattr(module, "time", moved)
    return moved


@pytest.fixture
def reconciler(db, launcher):
    return Reconciler(launcher, SnapshotHolder(), "")


@pytest.fixture
def deployment(db):
    return create_deployment("demo", register_model("demo", "/models/demo", "tester"), "tester")


@pytest.fixture
def store(settings, tmp_path):
    """An adapter store of the test's own."""
    settings.ADAPTER_STORE = tmp_path / "store"
    return settings.ADAPTER_STORE


@pytest.fixture
def model():
    """A registered model."""
    return register_model("demo", "/models/demo", "tester").model
