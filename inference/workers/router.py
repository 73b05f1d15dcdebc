"""Selects the worker for a request: connections to the running deployments' workers, synced with the snapshot."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field, replace
from random import Random
from typing import TYPE_CHECKING

import msgspec
import structlog

from engine.casualties import Casualties
from engine.client import EngineClient, EngineDead
from engine.messages import AdapterRef
from inference.errors import ModelNotFound, Unavailable
from inference.workers.routing.backoff import Backoff
from inference.workers.routing.balancer import Balancer
from inference.workers.routing.outputs import RoutedOutputs
from inference.workers.routing.retry_budget import RetryBudget
from inference.workers.tokenizer import ModelTokenizer

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable, Collection

    from engine.messages import ModelInfo, RequestOutput
    from inference.workers.routing.assignment import Assignment
    from inference.workers.routing.demand import Demand
    from management.snapshot import AdapterEntry, DeploymentEntry, Snapshot, SnapshotHolder, WorkerEntry

logger = structlog.get_logger(__name__)

CHECK_EVERY_S = 0.25
NO_WORKER = "The model is not available at the moment; its workers are starting or restarting."
RESEND_AFTER_S = 2.0
"""Seconds before a failed adapter command is retried."""


@dataclass(slots=True)
class Target:
    """A deployment that can serve requests: model info, tokenizer, connected workers."""

    entry: DeploymentEntry
    info: ModelInfo
    tokenizer: ModelTokenizer
    balancer: Balancer
    retries: RetryBudget
    clients: dict[WorkerEntry, EngineClient] = field(default_factory=dict)
    adapter: AdapterEntry | None = None
    """The requested adapter; set only in the result of `resolve`."""

    @property
    def adapter_ref(self) -> AdapterRef | None:
        """The adapter as the engine's AdapterRef."""
        return None if self.adapter is None else AdapterRef(self.adapter.digest, self.adapter.directory)

    def assign(self, demand: Demand) -> Assignment:
        """The worker for a new request (`inference.workers.routing`); raises Unavailable if there is none.

        Workers that drain or are without recent heartbeats get nothing.
        """
        self.retries.note_request()
        assignment = self.balancer.assign(self.clients, demand)
        if assignment is None:
            raise Unavailable(NO_WORKER)
        return assignment

    def assign_again(self, demand: Demand, tried: Collection[EngineClient]) -> Assignment | None:
        """Another worker for a request that those of `tried` did not take; None if there is none, or if too many requests
        were sent again lately.
        """
        if not any(client not in tried for client in self.responsive) or not self.retries.withdraw():
            return None
        return self.balancer.assign(self.clients, demand, avoid=tried)

    def route(
        self, demand: Demand, submit: Callable[[EngineClient], AsyncGenerator[RequestOutput, None]]
    ) -> RoutedOutputs:
        """The outputs of a request that `submit` sends to the chosen worker; raises Unavailable if there is none."""
        return RoutedOutputs(self.assign(demand), submit, lambda tried: self.assign_again(demand, tried))

    @property
    def responsive(self) -> list[EngineClient]:
        """Usable workers with recent heartbeats."""
        return [client for client in self.clients.values() if client.usable and not client.suspect]

    def relieve(self) -> None:
        """Move requests without a first token from silent workers to others, if there are any; eject slow workers."""
        if self.responsive:
            for client in self.clients.values():
                if client.suspect:
                    client.release_waiting()
        self.balancer.eject_slow(self.clients)


@dataclass(slots=True)
class _Shared:
    """What the connections to a deployment's workers share, also while none of them is made."""

    balancer: Balancer
    loading_tokenizer: asyncio.Lock = field(default_factory=asyncio.Lock)


class EngineRouter:
    """Connects to workers, reconnects and disconnects as the snapshot changes."""

    def __init__(self, holder: SnapshotHolder, parse_special_tokens: bool = True, random: Random | None = None) -> None:
        """`parse_special_tokens` is passed to the models' tokenizers. `random` decides between equal workers."""
        self._holder, self._parse_special_tokens = holder, parse_special_tokens
        self._random = random or Random()
        self.retries = RetryBudget(time.monotonic)
        self._targets: dict[str, Target] = {}
        self._refused: set[WorkerEntry] = set()
        self._casualties = Casualties()
        self._sent: dict[WorkerEntry, dict[str, AdapterEntry]] = {}
        """Per worker: the adapters that it confirmed, by digest."""
        self._retry_at: dict[WorkerEntry, float] = {}
        self._syncs: dict[WorkerEntry, asyncio.Task[None]] = {}
        self._connecting: dict[WorkerEntry, asyncio.Task[None]] = {}
        self._backoffs: dict[WorkerEntry, Backoff] = {}
        """Of the workers that could not be reached."""
        self._shared: dict[str, _Shared] = {}
        """By deployment."""
        self._wake = asyncio.Event()
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
        tasks = [*self._connecting.values(), *self._syncs.values(), *([self._task] if self._task is not None else [])]
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
            target.balancer.retain({*workers, *target.clients})
            if name not in wanted and not target.clients:
                del self._targets[name]
        for deployment in snapshot.deployments:
            for worker in deployment.workers:
                self._start_connecting(deployment, worker)
            if deployment.name in self._targets:
                self._start_adapter_sync(self._targets[deployment.name], deployment)
        present = {worker for deployment in snapshot.deployments for worker in deployment.workers}
        self._backoffs = {worker: backoff for worker, backoff in self._backoffs.items() if worker in present}
        self._shared = {n: shared for n, shared in self._shared.items() if n in wanted or n in self._targets}

    def _start_connecting(self, deployment: DeploymentEntry, worker: WorkerEntry) -> None:
        """Connect to a worker unless that is done, being done, or to be tried later; no worker waits for another."""
        target, backoff = self._targets.get(deployment.name), self._backoffs.get(worker)
        connected = target is not None and worker in target.clients
        if connected or worker in self._refused or worker in self._connecting or (backoff and not backoff.over):
            return
        task = asyncio.ensure_future(self._connect(deployment, worker))
        self._connecting[worker] = task
        task.add_done_callback(lambda _: self._connecting.pop(worker))

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
        if deployment.name not in self._shared:
            self._shared[deployment.name] = _Shared(Balancer(time.monotonic, self._random))
        shared = self._shared[deployment.name]
        observer = shared.balancer.record(worker)
        client = EngineClient(worker.address, worker.worker_id, worker.epoch, self._casualties, observer)
        connected = False
        try:
            info = await client.connect()
            async with shared.loading_tokenizer:  # the first of the workers that connect at once loads it
                target = self._targets.get(deployment.name)
                same = target is not None and target.info.tokenizer_file == info.tokenizer_file
                tokenizer = target.tokenizer if target and same else await self._load_tokenizer(info)
                # A restarted worker may have other limits than the one before it.
                target = Target(deployment, info, tokenizer, shared.balancer, self.retries)
                target.clients = self._clients(deployment.name)
                target.clients[worker] = client
                self._targets[deployment.name] = target
            connected = True
            self._backoffs.pop(worker, None)
            self._wake.set()  # its adapters
            logger.info("worker connected", worker=worker.worker_id, deployment=deployment.name)
        except EngineDead as error:
            backoff = self._backoffs.setdefault(worker, Backoff(time.monotonic))
            if backoff.fail(str(error)):
                logger.info("worker not reachable", worker=worker.worker_id, reason=str(error))
        except Exception as error:  # any error in its files: this worker cannot be used, others can
            logger.exception("tokenizer not usable", deployment=deployment.name, reason=str(error))
            self._refused.add(worker)
        finally:
            if not connected:
                await client.close()

    def _clients(self, deployment: str) -> dict[WorkerEntry, EngineClient]:
        """The connections to the deployment's workers now."""
        target = self._targets.get(deployment)
        return {} if target is None else target.clients


def _desired_adapters(deployment: DeploymentEntry) -> dict[str, AdapterEntry]:
    """The desired adapters (preload or pinned), by digest."""
    return {adapter.digest: adapter for adapter in deployment.adapters if adapter.preload or adapter.pinned}


def _released(adapter: AdapterEntry) -> AdapterEntry:
    """The same adapter without preload and pin."""
    return msgspec.structs.replace(adapter, preload=False, pinned=False)
