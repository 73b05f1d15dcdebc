"""The registries as a test's list: every version is a deployment, and its workers are fake ones."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from inference.errors import ModelExists, SourceNotFound
from inference.workers.registry import DeploymentState, NewDeployment, WorkerState
from management.snapshot import AdapterEntry, DeploymentEntry, Snapshot, WorkerEntry
from tests.unit.fake_worker import FakeWorker
from tests.unit.serving import Serving

CREATED = 1700000000


class Versions:
    """Implements the part of `inference.workers.registry.Registry` that this dialect uses."""

    def __init__(self, serving: Serving, folder: Path) -> None:
        self._serving, self._folder = serving, folder
        self.sources = {"demo", "densenet161", "org/tiny"}
        self.states: list[DeploymentState] = []
        self.fakes: dict[str, list[FakeWorker]] = {}
        self.adapters: tuple[AdapterEntry, ...] = ()
        self.broken = ""
        """Why no worker starts."""
        self.leftover: Iterator[int] = iter(())
        """How many workers each question finds that have not ended yet."""
        self.wanted: list[NewDeployment] = []

    async def deployments(self) -> list[DeploymentState]:
        return list(self.states)

    async def create_deployment(self, wanted: NewDeployment, actor: str) -> DeploymentState:
        self.wanted.append(wanted)
        source = next((name for name in wanted.candidates if name in self.sources), None)
        if source is None:
            raise SourceNotFound("nothing there")
        name, label = wanted.served_name or source, wanted.label or "1"
        others = [each for each in self.states if each.served_name == name]
        if any(each.label == label for each in others):
            raise ModelExists(name, label)
        made = DeploymentState(
            f"{name}-{label}", 1, "stopped", "", name, label, not others, source, 0, 0, 0, dict(wanted.vendor_fields)
        )
        self.states.append(made)
        await self.scale_deployment(made.name, wanted.workers, wanted.workers, actor)
        return next(each for each in self.states if each.name == made.name)

    async def scale_deployment(self, name: str, minimum: int, maximum: int, actor: str) -> bool:
        fakes = self.fakes.setdefault(name, [])
        while len(fakes) < minimum and not self.broken:
            path = self._folder / f"{name}-{len(fakes)}.sock"
            fakes.append(await FakeWorker(path, f"{name}/{len(fakes)}").start())
        for fake in fakes[maximum:]:
            await fake.close()
        del fakes[maximum:]
        workers = tuple(WorkerState(i, "ready", CREATED, os.getpid()) for i in range(len(fakes)))
        state = "failed" if self.broken else "ready" if fakes else "stopped"
        return self._change(name, min_workers=minimum, max_workers=maximum, wanted_workers=max(minimum, len(fakes)), workers=workers,
                            state=state, reason=self.broken)  # fmt: skip

    async def remove_deployment(self, name: str, actor: str) -> bool:
        known = any(each.name == name for each in self.states)
        self.states = [each for each in self.states if each.name != name]
        for fake in self.fakes.pop(name, []):
            await fake.close()
        self.publish()
        return known

    async def leftover_workers(self, name: str) -> int:
        return next(self.leftover, 0)

    async def make_default_version(self, name: str, actor: str) -> bool:
        served = next(each.served_name for each in self.states if each.name == name)
        self.states = [
            replace(each, is_default_version=each.name == name) if each.served_name == served else each
            for each in self.states
        ]
        self.publish()
        return True

    def publish(self) -> None:
        """What the registries say now."""
        entries = []
        for number, state in enumerate(self.states):
            if not state.wanted_workers:
                continue
            fakes = self.fakes.get(state.name, [])
            workers = tuple(WorkerEntry(f.worker_id, f.epoch, f"unix:{f.path}", f.model_version) for f in fakes)
            entry = DeploymentEntry(
                state.name, state.source, 1, CREATED, number == 0, workers, self.adapters, public_id=f"a{number}",
                served_name=state.served_name, label=state.label, is_default_version=state.is_default_version,
            )  # fmt: skip
            entries.append(entry)
        self._serving.holder.publish(Snapshot(tuple(entries), self._serving.keys))

    async def close(self) -> None:
        """End all workers."""
        for fakes in self.fakes.values():
            for fake in fakes:
                await fake.close()

    def _change(self, name: str, **fields: Any) -> bool:
        known = any(each.name == name for each in self.states)
        self.states = [replace(each, **fields) if each.name == name else each for each in self.states]
        self.publish()
        return known
