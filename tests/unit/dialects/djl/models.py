"""DJL Serving's plane over fake workers, and a registry in memory with several models."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec

from inference.dialects.djl.results import Results
from inference.dialects.djl.routes import routes
from inference.dialects.djl.state import DjlState
from inference.errors import AdapterExists, AdapterNotFound, ModelExists, SourceNotFound
from inference.http.routing import RouteTable
from inference.planes.plane import Plane
from inference.vendors.model_server import answer_headers
from inference.workers.adapters import AdapterControl
from inference.workers.registry import DeploymentState, NewDeployment, WorkerState
from management.snapshot import AdapterEntry, Availability, DeploymentEntry, Snapshot, WorkerEntry
from tests.unit.fake_worker import FakeWorker
from tests.unit.serving import Answer, Serving
from tests.waiting import eventually


@dataclass
class Deployed:
    """One deployment of the registry, with the fake workers that serve it."""

    state: DeploymentState
    workers: list[FakeWorker] = field(default_factory=list)
    adapters: list[AdapterEntry] = field(default_factory=list)
    is_default: bool = False

    @property
    def entry(self) -> DeploymentEntry:
        state = self.state
        workers = tuple(WorkerEntry(w.worker_id, w.epoch, f"unix:{w.path}", w.model_version) for w in self.workers)
        return DeploymentEntry(
            name=state.name,
            model=state.name,
            version=1,
            created=1,
            is_default=self.is_default,
            workers=workers,
            adapters=tuple(self.adapters),
            public_id=state.name.encode().hex(),
            availability=Availability.FAILED if state.state == "failed" else Availability.COMING,
            served_name=state.served_name,
            label=state.label,
            is_default_version=state.is_default_version,
        )


class MemoryRegistry:
    """Implements `inference.workers.registry.Registry`; adapters and models are what a test says lies at a path."""

    def __init__(self, serving: Serving) -> None:
        self._serving = serving
        self.files: dict[str, AdapterEntry] = {}
        self.sources: set[str] = set()
        self.deployed: dict[str, Deployed] = {}
        self.created: list[NewDeployment] = []
        self.starts_as = "ready"
        self.reason = ""

    def publish(self) -> None:
        serving = [each for each in self.deployed.values() if each.state.state != "stopped"]
        self._serving.holder.publish(Snapshot(tuple(each.entry for each in serving), self._serving.keys))

    def add(self, name: str, workers: list[FakeWorker], **changes: Any) -> Deployed:
        now = [WorkerState(i, "ready", 1700000000.0, 1) for i in range(len(workers))]
        state = DeploymentState(
            name, 1, "ready", "", served_name=name, label="1.0", source=f"/models/{name}", workers=now,
            wanted_workers=len(now), max_workers=max(1, len(now)),
        )  # fmt: skip
        self.deployed[name] = Deployed(replace(state, **changes), workers)
        self.publish()
        return self.deployed[name]

    async def read_adapter(self, name: str, source: str, options: Mapping[str, str] | None) -> AdapterEntry:
        if source not in self.files:
            raise AdapterNotFound(source)
        return msgspec.structs.replace(self.files[source], name=name, source=source)

    async def register_adapter(
        self, adapter: AdapterEntry, deployment: str, actor: str, *, replace: bool,
        preload: bool | None = None, pinned: bool | None = None, options: Any = None,
    ) -> None:  # fmt: skip
        if any(a.name == adapter.name for a in self.deployed[deployment].adapters) and not replace:
            raise AdapterExists(adapter.name)
        made = msgspec.structs.replace(
            adapter, preload=bool(preload), pinned=bool(pinned), options=tuple((options or {}).items())
        )
        self.deployed[deployment].adapters.append(made)
        self.publish()

    async def change_adapter(
        self, name: str, deployment: str, actor: str, *,
        preload: bool | None = None, pinned: bool | None = None, options: Any = None,
    ) -> None:  # fmt: skip
        adapters = self.deployed[deployment].adapters
        index = next((i for i, a in enumerate(adapters) if a.name == name), None)
        if index is None:
            raise AdapterNotFound(name)
        old = adapters[index]
        adapters[index] = msgspec.structs.replace(
            old,
            preload=old.preload if preload is None else preload,
            pinned=old.pinned if pinned is None else pinned,
            options=tuple({**dict(old.options), **(options or {})}.items()),
        )
        self.publish()

    async def remove_adapter(self, name: str, actor: str, deployment: str) -> None:
        for each in self.deployed.values():
            if deployment in (None, each.state.name):
                each.adapters = [a for a in each.adapters if a.name != name]
        self.publish()

    async def deployments(self) -> list[DeploymentState]:
        return [each.state for each in self.deployed.values()]

    async def create_deployment(self, wanted: NewDeployment, actor: str) -> DeploymentState:
        source = next((each for each in wanted.candidates if each in self.sources), None)
        if source is None:
            raise SourceNotFound("there is no such model")
        name, label = wanted.served_name or source.rsplit("/", 1)[-1], wanted.label or "1.0"
        others = [d.state for d in self.deployed.values() if d.state.served_name == name]
        if any(other.label == label for other in others) or (wanted.only and others):
            raise ModelExists(name, label)
        self.created.append(wanted)
        first = all(d.state.served_name != name for d in self.deployed.values())
        maximum = wanted.workers if wanted.max_workers is None else wanted.max_workers
        state = "stopped" if not wanted.workers else self.starts_as
        deployed = self.add(
            name if first else f"{name}-{label}", [], state=state, served_name=name, label=label, source=source,
            vendor_fields=wanted.vendor_fields, is_default_version=first, min_workers=wanted.workers, max_workers=maximum,
            reason=self.reason, wanted_workers=0,
        )  # fmt: skip
        return deployed.state

    async def scale_deployment(self, name: str, minimum: int, maximum: int, actor: str) -> bool:
        known = self.deployed.get(name)
        if known is None:
            return False
        known.state = replace(known.state, min_workers=minimum, max_workers=maximum)
        return True

    async def remove_deployment(self, name: str, actor: str) -> bool:
        removed = self.deployed.pop(name, None)
        self.publish()
        return removed is not None


class Djl:
    """Calls to DJL Serving's plane."""

    def __init__(self, serving: Serving) -> None:
        self.serving = serving
        self.registry = MemoryRegistry(serving)
        self.registry.add("demo", serving.workers).is_default = True
        self.registry.publish()
        self.now = 0.0
        self.state = DjlState(results=Results(lambda: self.now))
        self.services = replace(
            serving.services,
            registry=self.registry,
            adapters=AdapterControl(self.registry, serving.router, serving.holder),
        )
        table = RouteTable([routes(self.state)])
        serving.planes["djl"] = Plane("djl", table, self.services, self.services.authenticator, answer_headers)

    @property
    def worker(self) -> FakeWorker:
        return self.serving.worker

    async def call(self, method: str, path: str, body: object = None, **headers: str) -> Answer:
        return await self.serving.begin(path, body, plane="djl", method=method, **headers).end()

    async def get(self, path: str, **headers: str) -> Answer:
        return await self.call("GET", path, **headers)

    async def post(self, path: str, body: object = None, **headers: str) -> Answer:
        return await self.call("POST", path, body, **headers)

    async def refused(self, method: str, path: str, status: int, kind: str, message: str, **options: Any) -> None:
        """The server's error body says this."""
        answer = await self.call(method, path, **options)
        assert (answer.status, answer.json()) == (status, {"code": status, "type": kind, "message": message})

    async def adapters(self, path: str = "/models/demo/adapters") -> list[Any]:
        return (await self.get(path)).json()["adapters"]

    async def has(self, *names: str) -> None:
        """Register adapters of these names, from files of these names."""
        for name in names:
            self.registry.files[f"/a/{name}"] = AdapterEntry(name, f"digest-{name}", f"/store/{name}", 1)
            answer = await self.post(f"/models/demo/adapters?name={name}&src=/a/{name}")
            assert answer.status == 200, answer.text
        await eventually(lambda: {a.name for a in self.serving.router.resolve("demo").entry.adapters} >= {*names})
