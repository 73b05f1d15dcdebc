"""The data plane in the test's own process: real services and planes, fake workers, and ASGI calls in place of sockets."""

from __future__ import annotations

import asyncio
import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote, urlsplit

import msgspec

from inference.admission.charges import Charges
from inference.admission.idempotency import IdempotencyStore
from inference.admission.permits import Admission
from inference.admission.rates import RateMeter
from inference.admission.standing import Standings
from inference.dialects import declared_dialects
from inference.dialects.mindie.routes import answer_headers, route_sets
from inference.dialects.mindie.settings import MindieSettings
from inference.dialects.mindie.state import MindieState
from inference.dialects.triton.statistics import TritonStatistics
from inference.errors import AdapterExists, AdapterNotFound, ModelExists, SourceNotFound
from inference.generation.embeddings import Embedder
from inference.generation.prepare import Generator
from inference.http.auth import Authenticator
from inference.http.routing import RouteTable
from inference.http.sites import Sites
from inference.metrics.requests import Metrics
from inference.planes.front import front_planes
from inference.planes.plane import Plane
from inference.services import Limits, Services, Shown
from inference.telemetry.base import Telemetry
from inference.workers.adapters import AdapterControl
from inference.workers.registry import DeploymentState
from inference.workers.router import EngineRouter
from management.snapshot import AdapterEntry, Availability, DeploymentEntry, Snapshot, SnapshotHolder, WorkerEntry
from tests.unit.fake_worker import FakeWorker, settle
from tests.waiting import PATIENCE_S, eventually

if TYPE_CHECKING:
    from inference.generation.generation import Observer
    from inference.telemetry.spans import OpenTelemetry


@dataclass
class Answer:
    """What came of a call so far; `chunks` as the plane cut them."""

    status: int = 0
    headers: list[tuple[bytes, bytes]] = field(default_factory=list)
    chunks: list[bytes] = field(default_factory=list)

    @property
    def body(self) -> bytes:
        return b"".join(self.chunks)

    @property
    def text(self) -> str:
        return self.body.decode()

    def json(self) -> Any:
        return json.loads(self.body)

    def header(self, name: str) -> str | None:
        """The value, or None."""
        return next((v.decode() for k, v in self.headers if k.decode().lower() == name), None)

    @property
    def events(self) -> list[Any]:
        """The JSON of every `data:` line; [DONE] stays text."""
        lines = [line.removeprefix("data:").strip() for line in self.text.splitlines() if line.startswith("data:")]
        return [line if line == "[DONE]" else json.loads(line) for line in lines]


class Call:
    """One ASGI call that runs: its answer as it grows, and a client that may hang up."""

    def __init__(self, plane: Any, method: str, url: str, body: bytes, headers: dict[str, str]) -> None:
        self.answer = Answer()
        self._gone, self._came, self._reading = asyncio.Event(), asyncio.Event(), asyncio.Event()
        self._reading.set()
        self._unread: list[dict[str, Any]] = [{"type": "http.request", "body": body, "more_body": False}]
        parts = urlsplit(url)
        scope = {
            "type": "http",
            "method": method,
            "path": unquote(parts.path),
            "query_string": parts.query.encode(),
            "headers": [(k.lower().encode(), v.encode("latin-1")) for k, v in headers.items()],
            "client": ["127.0.0.1", 50000],
            "server": ["127.0.0.1", 8000],
        }
        self.task = asyncio.create_task(plane(scope, self._receive, self._send))
        self.task.add_done_callback(lambda _: self._came.set())

    async def end(self) -> Answer:
        """The complete answer; raises what the plane raised."""
        async with asyncio.timeout(PATIENCE_S):
            await self.task
        return self.answer

    async def chunks(self, count: int) -> list[bytes]:
        """At least so many, once they are there."""
        async with asyncio.timeout(PATIENCE_S):
            while len(self.answer.chunks) < count:
                assert not self.task.done(), self.answer
                self._came.clear()
                await self._came.wait()
        return self.answer.chunks

    def hang_up(self) -> None:
        """The client goes."""
        self._gone.set()

    def read_no_more(self) -> None:
        """The plane's next chunk waits until `hang_up` or `read_on`."""
        self._reading.clear()

    def read_on(self) -> None:
        """Read what came meanwhile, and all that comes."""
        self._reading.set()

    async def _receive(self) -> dict[str, Any]:
        if self._unread:
            return self._unread.pop()
        await self._gone.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: dict[str, Any]) -> None:
        await self._reading.wait()
        if message["type"] == "http.response.start":
            self.answer.status, self.answer.headers = message["status"], list(message["headers"])
        elif message.get("body"):
            self.answer.chunks.append(message["body"])
        self._came.set()


def _kept(adapter, preload, pinned, options):
    return msgspec.structs.replace(
        adapter,
        preload=adapter.preload if preload is None else preload,
        pinned=adapter.pinned if pinned is None else pinned,
        options=adapter.options if options is None else tuple(options.items()),
    )


class KnownRegistry:
    """The registries as a list: adapters are what a test says lies at a path."""

    def __init__(self, serving: Serving) -> None:
        self._serving = serving
        self.files: dict[str, AdapterEntry] = {}
        self.states: list[DeploymentState] = [DeploymentState("demo", 1, "ready", "", served_name="demo", label="1.0")]
        self.sources: dict[str, str] = {}
        self.asked: list[tuple[str, str]] = []

    async def read_adapter(self, name: str, source: str, options: Mapping[str, str] | None) -> AdapterEntry:
        if source not in self.files:
            raise AdapterNotFound(name)
        return self.files[source]

    async def register_adapter(self, adapter, deployment, actor, *, replace, preload=None, pinned=None, options=None):
        known = {a.name: a for a in self._serving.adapters}
        if adapter.name in known and not replace:
            raise AdapterExists(adapter.name)
        known[adapter.name] = _kept(msgspec.structs.replace(adapter, created=1), preload, pinned, options)
        self._serving.adapters = tuple(known.values())
        self._serving.publish()

    async def change_adapter(self, name, deployment, actor, *, preload=None, pinned=None, options=None):
        known = {a.name: a for a in self._serving.adapters}
        if name not in known:
            raise AdapterNotFound(name)
        known[name] = _kept(known[name], preload, pinned, {**dict(known[name].options), **(options or {})})
        self._serving.adapters = tuple(known.values())
        self._serving.publish()

    async def remove_adapter(self, name, actor, deployment):
        self._serving.adapters = tuple(a for a in self._serving.adapters if a.name != name)
        self._serving.publish()

    async def create_deployment(self, wanted, actor):
        """Sources are known if a test says so: `sources` maps a candidate to the model that is found."""
        found = next((self.sources[c] for c in wanted.candidates if c in self.sources), None)
        if found is None:
            raise SourceNotFound("no model of this name is known here")
        name = wanted.served_name or found
        versions = [s for s in self.states if s.served_name == name]
        label = wanted.label or f"{len(versions) + 1}.0"
        if any(s.label == label or (s.source == found and not wanted.label) for s in versions):
            raise ModelExists(name, label)
        state = DeploymentState(
            f"{name}/{label}" if versions else name, 1, "starting" if wanted.workers else "stopped", "",
            served_name=name, label=label, is_default_version=not versions, source=found,
            min_workers=wanted.workers, max_workers=wanted.max_workers or max(1, wanted.workers),
            wanted_workers=wanted.workers, vendor_fields=wanted.vendor_fields,
        )  # fmt: skip
        self.states.append(state)
        return state

    async def scale_deployment(self, name, minimum, maximum, actor):
        self.asked.append(("scale", f"{name} {minimum} {maximum}"))
        return self._change(name, min_workers=minimum, max_workers=max(1, maximum), wanted_workers=minimum)

    async def leftover_workers(self, name):
        return 0

    async def remove_deployment(self, name, actor):
        self.asked.append(("remove", name))
        known = any(s.name == name for s in self.states)
        self.states = [s for s in self.states if s.name != name]
        return known

    async def make_default_version(self, name, actor):
        served = next((s.served_name for s in self.states if s.name == name), None)
        for state in [s for s in self.states if s.served_name == served]:
            self._change(state.name, is_default_version=state.name == name)
        return served is not None

    def _change(self, name, **changes):
        known = any(s.name == name for s in self.states)
        self.states = [dataclasses.replace(s, **changes) if s.name == name else s for s in self.states]
        return known

    async def deployments(self) -> list[DeploymentState]:
        return self.states

    async def start_deployment(self, name: str, actor: str) -> bool:
        self.asked.append(("start", name))
        return any(s.name == name for s in self.states)

    async def stop_deployment(self, name: str, actor: str) -> bool:
        self.asked.append(("stop", name))
        return any(s.name == name for s in self.states)


class FirstOf(Random):
    """No random choice: the first of equal workers, so that a test knows which one is asked."""

    def choice(self, seq: Any) -> Any:
        return seq[0]

    def sample(self, population: Any, k: int, *, counts: Any = None) -> list[Any]:
        return list(population[:k])


class Serving:
    """One deployment, "demo", served by fake workers, and the planes over it."""

    def __init__(
        self,
        workers: list[FakeWorker],
        *,
        max_concurrent_requests: int = 256,
        max_requests_per_tenant: int = 0,
        api_key_required: bool = False,
        request_timeout_s: float = 600.0,
        replay_wait_s: float = 0.0,
        limits: Limits | None = None,
        mindie: MindieSettings | None = None,
        sites: Sites | None = None,
        shown: Shown | None = None,
        telemetry: OpenTelemetry | None = None,
        token_timeout_s: float = 0.0,
        objectives: dict[str, int] | None = None,
        max_idempotency_bytes: int = 1 << 20,
        rates: RateMeter | None = None,
    ) -> None:
        self.workers = workers
        self.adapters: tuple[AdapterEntry, ...] = ()
        self.availability = Availability.COMING
        self.keys: dict[str, Any] = {}
        self.holder = SnapshotHolder()
        self.router = EngineRouter(self.holder, random=FirstOf())
        metrics = Metrics(self.router, lambda: 0, lambda: True)
        self.registry = KnownRegistry(self)
        authenticator = Authenticator(api_key_required)
        rates = rates or RateMeter()
        observers: list[Observer] = [metrics, Charges(rates), *([] if telemetry is None else [telemetry])]
        self.services = Services(
            holder=self.holder,
            router=self.router,
            generator=Generator(
                self.router,
                observers,
                request_timeout_s,
                replay_wait_s,
                token_timeout_s,
            ),
            embedder=Embedder(
                self.router,
                request_timeout_s,
                replay_wait_s,
                rejected=metrics.rejected,
                observers=observers,
                charge=rates.charge,
            ),
            adapters=AdapterControl(self.registry, self.router, self.holder),
            registry=self.registry,
            admission=Admission(max_concurrent_requests, max_requests_per_tenant),
            authenticator=authenticator,
            metrics=metrics,
            limits=limits or Limits(),
            sites=sites or Sites(),
            version="0.1.0",
            shown=shown or Shown(),
            telemetry=telemetry or Telemetry(),
            rates=rates,
            standings=Standings(objectives or {}),
            idempotency=IdempotencyStore(max_idempotency_bytes),
        )
        self.services.idempotency.replayed = metrics.replayed
        self.services.admission.on_refused = metrics.rejected
        self.terminated: list[float | None] = []
        self.mindie = MindieState(mindie or MindieSettings(), self.router, self.terminated.append)
        self.services.generator.observers += [self.mindie.latency, self.mindie.metrics, TritonStatistics()]
        self.planes: dict[str, Plane] = dict(
            zip(("front", "links"), front_planes(self.services, declared_dialects()), strict=True)
        )
        for name, declared in route_sets(self.mindie).items():
            plane = Plane(f"mindie-{name}", RouteTable([declared]), self.services, authenticator, answer_headers)
            self.planes["mindie" if name == "service" else name] = plane
        self._calls: list[Call] = []

    @property
    def worker(self) -> FakeWorker:
        """The only one, or the first."""
        return self.workers[0]

    def publish(self, workers: list[FakeWorker] | None = None) -> None:
        """What the registries say now."""
        listed = self.workers if workers is None else workers
        entries = tuple(
            WorkerEntry(w.worker_id, w.epoch, f"unix:{w.path}", w.model_version, w.numerics, w.role) for w in listed
        )
        deployment = DeploymentEntry(
            "demo", "demo", 1, 1700000000, True, entries, self.adapters, availability=self.availability
        )
        self.holder.publish(Snapshot((deployment,), self.keys))

    async def start(self) -> Serving:
        """Connect to every worker."""
        for worker in self.workers:
            await worker.start()
        self.publish()
        self.router.start()
        await self.connected(len(self.workers))
        return self

    async def connected(self, count: int) -> None:
        """Until so many workers can be used."""
        await eventually(lambda: sum(len(t.responsive) for t in self.router.targets) == count)

    async def stop(self) -> None:
        """Hang up on clients and workers."""
        for call in self._calls:
            call.hang_up()
            call.task.cancel()
        await asyncio.gather(*(call.task for call in self._calls), return_exceptions=True)
        await self.router.stop()
        for worker in self.workers:
            await worker.close()
        await settle()

    def begin(
        self, path: str, body: object = None, *, plane: str = "front", method: str = "POST", **headers: str
    ) -> Call:
        """A call that runs beside the test; headers' names are written with `_`."""
        content = body if isinstance(body, bytes) else b"" if body is None else json.dumps(body).encode()
        named = {"host": "localhost", **{name.replace("_", "-"): value for name, value in headers.items()}}
        call = Call(self.planes[plane], method, path, content, named)
        self._calls.append(call)
        return call

    async def post(self, path: str, body: object, *, plane: str = "front", **headers: str) -> Answer:
        """The whole answer."""
        return await self.begin(path, body, plane=plane, **headers).end()

    async def get(self, path: str, *, plane: str = "front", **headers: str) -> Answer:
        """The whole answer."""
        return await self.begin(path, plane=plane, method="GET", **headers).end()


def fake_workers(folder: Path, count: int, **changes: Any) -> list[FakeWorker]:
    """Workers of one deployment; none listens yet."""
    return [FakeWorker(folder / f"{i}.sock", f"demo/{i}", **changes) for i in range(count)]
