"""Selects the worker for a request: connections to the running deployments' workers, synced with the snapshot."""

from __future__ import annotations

import asyncio
import time
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import msgspec
import structlog

from engine.casualties import Casualties
from engine.client import EngineClient, EngineDead
from engine.messages import AdapterRef
from inference.errors import ModelNotFound, Unavailable
from inference.workers.tokenizer import ModelTokenizer

if TYPE_CHECKING:
    from engine.messages import ModelInfo
    from management.snapshot import AdapterEntry, DeploymentEntry, Snapshot, SnapshotHolder, WorkerEntry

logger = structlog.get_logger(__name__)

CHECK_EVERY_S = 0.25
RESEND_AFTER_S = 2.0
"""Seconds before a failed adapter command is retried."""


@dataclass(slots=True)
class Target:
    """A deployment that can serve requests: model info, tokenizer, connected workers."""

    entry: DeploymentEntry
    info: ModelInfo
    tokenizer: ModelTokenizer
    clients: dict[WorkerEntry, EngineClient] = field(default_factory=dict)
    adapter: AdapterEntry | None = None
    """The requested adapter; set only in the result of `resolve`."""

    @property
    def adapter_ref(self) -> AdapterRef | None:
        """The adapter as the engine's AdapterRef."""
        return None if self.adapter is None else AdapterRef(self.adapter.digest, self.adapter.directory)

    def pick(self, version: int | None = None) -> EngineClient:
        """The usable worker with the fewest requests of this process, of this model version if one is given.

        Workers without recent heartbeats are skipped. Raises Unavailable if none is left.
        """
        responsive = [client for client in self.responsive if version is None or self.version_of(client) == version]
        if not responsive:
            raise Unavailable("The model is not available at the moment; its workers are starting or restarting.")
        return min(responsive, key=lambda client: client.inflight)

    @property
    def responsive(self) -> list[EngineClient]:
        """Usable workers with recent heartbeats."""
        return [client for client in self.clients.values() if client.usable and not client.suspect]

    def version_of(self, client: EngineClient) -> int:
        """The model version that this worker serves (`WorkerEntry.model_version`)."""
        return next(worker.model_version for worker, known in self.clients.items() if known is client)

    def relieve(self) -> None:
        """Move requests without a first token from silent workers to others, if there are any."""
        if self.responsive:
            for client in self.clients.values():
                if client.suspect:
                    client.release_waiting()


class EngineRouter:
    """Connects to workers, reconnects and disconnects as the snapshot changes."""

    def __init__(self, holder: SnapshotHolder, parse_special_tokens: bool = True) -> None:
        """`parse_special_tokens` is passed to the models' tokenizers."""
        self._holder, self._parse_special_tokens = holder, parse_special_tokens
        self._targets: dict[str, Target] = {}
        self._refused: set[WorkerEntry] = set()
        self._casualties = Casualties()
        self._sent: dict[WorkerEntry, dict[str, AdapterEntry]] = {}
        """Per worker: the adapters that it confirmed, by digest."""
        self._retry_at: dict[WorkerEntry, float] = {}
        self._syncs: dict[WorkerEntry, asyncio.Task[None]] = {}
        self._wake = asyncio.Event()
        self._arrived = asyncio.Event()
        """Set, and replaced by another one, when a worker connects and when the router stops."""
        self._task: asyncio.Task[None] | None = None
        self.stopping = False
        """Set during shutdown, so that closed connections are not logged as failures."""

    def start(self) -> None:
        """Start following the snapshot; call on the event loop."""
        loop = asyncio.get_running_loop()
        self._holder.subscribe(lambda _: loop.call_soon_threadsafe(self._wake.set))
        self._task = loop.create_task(self._follow())

    async def stop(self) -> None:
        """Close all connections; requests in flight fail with ShuttingDown."""
        self.stopping = True
        self._announce()
        tasks = [*self._syncs.values(), *([self._task] if self._task is not None else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for target in self._targets.values():
            for client in target.clients.values():
                await client.close()

    @property
    def targets(self) -> list[Target]:
        """Deployments with a connected worker, now or a moment ago."""
        return list(self._targets.values())

    @property
    def ready(self) -> bool:
        """Whether any deployment can take a request now."""
        return any(target.responsive for target in self._targets.values())

    def resolve(self, name: str | None) -> Target:
        """Resolve a client's model name to a deployment and an adapter; raises ModelNotFound or Unavailable."""
        resolved = self._holder.current.resolve(name)
        if resolved is None:
            if name:
                raise ModelNotFound(name)
            raise Unavailable("No model is deployed.")
        target = self._targets.get(resolved.deployment.name)
        if target is None:
            raise Unavailable("The model is still loading.")
        return target if resolved.adapter is None else replace(target, adapter=resolved.adapter)

    def available(self, target: Target, version: int) -> EngineClient | None:
        """The worker of the target's deployment that a request for this model version should go to now, or None."""
        current = self._targets.get(target.entry.name)
        try:
            return None if current is None else current.pick(version)
        except Unavailable:
            return None

    async def arrival(self, timeout_s: float) -> None:
        """Wait until a worker has connected or the router stops, at most `timeout_s` seconds."""
        with suppress(TimeoutError):
            await asyncio.wait_for(self._arrived.wait(), timeout_s)

    def _announce(self) -> None:
        self._arrived.set()
        self._arrived = asyncio.Event()

    async def _follow(self) -> None:
        while True:
            try:
                await self._reconcile(self._holder.current)
            except Exception:  # outermost handler: one bad model must not stop the routing to all others
                logger.exception("snapshot update failed")
            self._wake.clear()
            try:
                await asyncio.wait_for(self._wake.wait(), CHECK_EVERY_S)
            except TimeoutError:
                continue

    async def _reconcile(self, snapshot: Snapshot) -> None:
        wanted = {deployment.name: deployment for deployment in snapshot.deployments}
        for name, target in list(self._targets.items()):
            workers = wanted[name].workers if name in wanted else ()
            for worker, client in list(target.clients.items()):
                leaving = worker not in workers and client.inflight == 0
                if leaving or client.failure is not None:
                    logger.info("worker disconnected", worker=worker.worker_id, reason=client.failure or "left")
                    del target.clients[worker]
                    self._sent.pop(worker, None)
                    self._retry_at.pop(worker, None)
                    self._syncs.pop(worker, None)
                    await client.close()
            target.relieve()
            if name not in wanted and not target.clients:
                del self._targets[name]
        for deployment in snapshot.deployments:
            for worker in deployment.workers:
                target_now = self._targets.get(deployment.name)
                connected = target_now is not None and worker in target_now.clients
                if not connected and worker not in self._refused:
                    await self._connect(deployment, worker)
            if deployment.name in self._targets:
                self._start_adapter_sync(self._targets[deployment.name], deployment)

    def _start_adapter_sync(self, target: Target, deployment: DeploymentEntry) -> None:
        """Start a task that syncs the adapters of the deployment's workers."""
        known = {adapter.digest for adapter in deployment.adapters}
        gone = {a.digest: _released(a) for a in target.entry.adapters if a.digest not in known}
        target.entry = deployment
        for worker, client in target.clients.items():
            if gone:
                sent = self._sent.setdefault(worker, {})
                sent.update({digest: adapter for digest, adapter in gone.items() if digest not in sent})
            if self._needs_sync(worker, client, deployment):
                self._syncs[worker] = asyncio.ensure_future(self._sync_adapters(worker, client, deployment))

    def _needs_sync(self, worker: WorkerEntry, client: EngineClient, deployment: DeploymentEntry) -> bool:
        """Whether the worker's adapters differ from the desired state and no sync is running."""
        if client.failure is not None or client.model.embedding is not None:
            return False
        if time.monotonic() < self._retry_at.get(worker, 0.0):
            return False
        if worker in self._syncs and not self._syncs[worker].done():
            return False
        return self._sent.get(worker, {}) != _desired_adapters(deployment)

    async def _sync_adapters(self, worker: WorkerEntry, client: EngineClient, deployment: DeploymentEntry) -> None:
        """Sync a worker's adapters with the registry: preload, pin, unload.

        Commands that the worker cannot carry out yet (pinning while it loads, unloading while in use) are retried
        after RESEND_AFTER_S.
        """
        sent = self._sent.setdefault(worker, {})
        wanted = _desired_adapters(deployment)
        known = {adapter.digest for adapter in deployment.adapters}
        try:
            for digest, adapter in wanted.items():
                if sent.get(digest) == adapter:
                    continue
                ref = AdapterRef(digest, adapter.directory)
                refusal = await client.command("load", ref) if digest not in sent else None
                was_pinned = digest in sent and sent[digest].pinned
                if refusal is None and adapter.pinned != was_pinned:
                    refusal = await client.command("pin" if adapter.pinned else "unpin", ref)
                if refusal is None:
                    sent[digest] = adapter
                else:
                    self._retry_at[worker] = time.monotonic() + RESEND_AFTER_S
            for digest, adapter in list(sent.items()):
                if digest in wanted:
                    continue
                ref = AdapterRef(digest, adapter.directory)
                if adapter.pinned:
                    await client.command("unpin", ref)
                if digest in known or await client.command("unload", ref) is None:
                    del sent[digest]
                else:
                    self._retry_at[worker] = time.monotonic() + RESEND_AFTER_S
        except EngineDead as error:
            logger.info("adapter sync failed", worker=worker.worker_id, reason=str(error))

    async def _load_tokenizer(self, info: ModelInfo) -> ModelTokenizer:
        return await asyncio.to_thread(ModelTokenizer.load, info, self._parse_special_tokens)

    async def _connect(self, deployment: DeploymentEntry, worker: WorkerEntry) -> None:
        client = EngineClient(worker.address, worker.worker_id, worker.epoch, self._casualties)
        try:
            info = await client.connect()
            target = self._targets.get(deployment.name)
            same = target is not None and target.info.tokenizer_file == info.tokenizer_file
            tokenizer = target.tokenizer if target and same else await self._load_tokenizer(info)
            clients = {} if target is None else target.clients
            # A restarted worker may have other limits than the one before it.
            self._targets[deployment.name] = Target(deployment, info, tokenizer, clients)
            clients[worker] = client
            self._announce()
            logger.info("worker connected", worker=worker.worker_id, deployment=deployment.name)
        except EngineDead as error:
            logger.info("worker not reachable", worker=worker.worker_id, reason=str(error))
        except Exception as error:  # any error in its files: this worker cannot be used, others can
            logger.exception("tokenizer not usable", deployment=deployment.name, reason=str(error))
            self._refused.add(worker)
            await client.close()


def _desired_adapters(deployment: DeploymentEntry) -> dict[str, AdapterEntry]:
    """The desired adapters (preload or pinned), by digest."""
    return {adapter.digest: adapter for adapter in deployment.adapters if adapter.preload or adapter.pinned}


def _released(adapter: AdapterEntry) -> AdapterEntry:
    """The same adapter without preload and pin."""
    return msgspec.structs.replace(adapter, preload=False, pinned=False)
