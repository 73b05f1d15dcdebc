"""Selects the worker for a request: connections to the running deployments' workers, synced with the snapshot."""

from __future__ import annotations

import asyncio
import math
import time
from contextlib import suppress
from dataclasses import dataclass, field, replace
from random import Random
from typing import TYPE_CHECKING, TypeVar

import msgspec
import structlog

from engine.casualties import Casualties
from engine.client import EngineClient, EngineDead
from engine.messages import ModelInfo
from inference.errors import ModelNotFound, ShuttingDown, Starting, TooLate, Unavailable, about
from inference.workers.adapter_sync import AdapterSync
from inference.workers.holding import FAILED, TOO_DEAR, HoldQueue, unavailable
from inference.workers.routing.backoff import Backoff
from inference.workers.routing.balancer import Balancer
from inference.workers.routing.retry_budget import RetryBudget
from inference.workers.scope import scope_id, scoped
from inference.workers.target import Superseded, Target, other_version
from inference.workers.tokenizer import ModelTokenizer
from management.snapshot import Availability

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Collection

    from engine.network.credentials import Credentials
    from inference.workers.routing.assignment import Assignment
    from inference.workers.routing.demand import Demand
    from management.snapshot import DeploymentEntry, Snapshot, SnapshotHolder, WorkerEntry

logger = structlog.get_logger(__name__)
T = TypeVar("T")

CHECK_EVERY_S = 0.25
NO_WORKER = "The model is not available at the moment; its workers are starting or restarting."
REMOVED = "The model has been removed."


@dataclass(slots=True)
class _Shared:
    """What the connections to a deployment's workers share, also while none of them is made."""

    balancer: Balancer
    loading_tokenizer: asyncio.Lock = field(default_factory=asyncio.Lock)


class EngineRouter:
    """Connects to workers, reconnects and disconnects as the snapshot changes."""

    def __init__(
        self,
        holder: SnapshotHolder,
        holding: HoldQueue | None = None,
        parse_special_tokens: bool = True,
        random: Random | None = None,
        hold_s: float = 0.0,
        credentials: Credentials | None = None,
    ) -> None:
        """`parse_special_tokens` is passed to the models' tokenizers. `random` decides between equal workers. `hold_s`: the
        seconds that a request may wait in `holding` for a worker. `credentials`: of this process, for workers on other hosts.
        """
        self._holder, self._parse_special_tokens = holder, parse_special_tokens
        self.holding, self.hold_s = holding or HoldQueue(), hold_s
        self._random, self._credentials = random or Random(), credentials
        self.retries = RetryBudget(time.monotonic)
        self._targets: dict[str, Target] = {}
        self._refused: set[WorkerEntry] = set()
        """Workers whose model's files could not be used here when that was last tried."""
        self._casualties = Casualties()
        self._adapters = AdapterSync()
        self._connecting: dict[WorkerEntry, asyncio.Task[None]] = {}
        self._backoffs: dict[WorkerEntry, Backoff] = {}
        """Of the workers that could not be reached."""
        self._preparing: dict[str, asyncio.Task[None]] = {}
        self._unusable: dict[DeploymentEntry, Backoff] = {}
        """Deployments whose model's files could not be read here."""
        self._shared: dict[str, _Shared] = {}
        """By deployment."""
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
        """Close all connections; requests in flight, and those that wait for a worker, fail with ShuttingDown."""
        self.stopping = True
        self._announce()
        self.holding.close()
        tasks = [
            *self._connecting.values(),
            *self._preparing.values(),
            *self._adapters.tasks,
            *([self._task] if self._task is not None else []),
        ]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        clients = [client for target in self._targets.values() for client in target.clients.values()]
        await asyncio.gather(*(client.close() for client in clients))

    @property
    def targets(self) -> list[Target]:
        """The known deployments: those with a connected worker, and those that sleep or restart."""
        names = {entry.name for entry in self.deployments}
        return [
            target for name, target in self._targets.items() if name in names or (target.clients and not scope_id())
        ]

    @property
    def deployments(self) -> tuple[DeploymentEntry, ...]:
        """All deployments, also those that have never been ready."""
        return scoped(self._holder.current).deployments

    @property
    def ready(self) -> bool:
        """Whether any deployment can take a request: now, or asleep, after it has been woken."""
        return any(target.responsive or target.asleep for target in self._targets.values())

    def resolve(self, name: str | None) -> Target:
        """Resolve a client's model name to a deployment and an adapter. Raises ModelNotFound; Starting if the deployment has
        never been ready; Unavailable if it has failed before that.

        In the scope of one deployment (`inference.workers.scope`) there is no other.
        """
        resolved = scoped(self._holder.current).resolve(name)
        if resolved is None:
            if name:
                raise ModelNotFound(name)
            raise Unavailable("No model is deployed.")
        entry = resolved.deployment
        target = self._targets.get(entry.name)
        if entry.shares_with and entry.shares_with in self._targets and not (target and target.responsive):
            asleep = entry.availability is Availability.ASLEEP
            target = replace(self._targets[entry.shares_with], wakes=entry.public_id if asleep else "")
        if target is None:
            if reason := self._hopeless(entry):
                raise unavailable(reason)
            raise Starting(entry.name)
        return target if resolved.adapter is None else replace(target, adapter=resolved.adapter)

    async def hold(self, target: Target, tenant: str, timeout_s: float) -> bool:
        """Wait until the target's deployment has a worker, and wake the one that it serves for; returns whether that took
        any time. Raises TooLate after `timeout_s` seconds, Overloaded or Unavailable.
        """
        name = target.entry.name
        if target.wakes:
            self.holding.wake(target.wakes)
        current = self._targets.get(name)
        if current is not None and current.responsive:
            return False
        await self._wait_for(name, tenant, timeout_s)
        return True

    async def when_known(self, tenant: str, run: Callable[[], Awaitable[T]], timeout_s: float = math.inf) -> T:
        """The result of `run`; if it finds a deployment that has never been ready, wait for that and run it again. All
        waits must be over `timeout_s` seconds from now. Raises TooLate, Overloaded or Unavailable.
        """
        give_up = time.monotonic() + timeout_s
        while True:
            try:
                return await run()
            except Starting as error:
                with about(error.model):
                    await self._wait_for(error.deployment, tenant, give_up - time.monotonic())

    async def _wait_for(self, name: str, tenant: str, timeout_s: float) -> None:
        entry = next((each for each in self._holder.current.deployments if each.name == name), None)
        if self.stopping:
            raise ShuttingDown("The server is shutting down.")
        if entry is not None and (reason := self._hopeless(entry)):
            raise unavailable(reason)
        if entry is None or not self.hold_s:
            raise Unavailable(NO_WORKER)
        try:
            async with asyncio.timeout(timeout_s):
                await self.holding.wait(entry.public_id, tenant, min(self.hold_s, entry.start_timeout_s))
        except TimeoutError as error:
            raise TooLate("The request cannot begin before its deadline.") from error

    def expects(self, target: Target) -> bool:
        """Whether the target's deployment has workers that are coming, or will have once a request wakes it."""
        entry = self._entry(target)
        return entry is not None and not self._hopeless(entry) and not self.stopping

    def has_failed(self, target: Target) -> bool:
        """Whether no worker of the target's deployment will come until a person acts."""
        entry = self._entry(target)
        return entry is not None and bool(self._hopeless(entry))

    def _entry(self, target: Target) -> DeploymentEntry | None:
        """The target's deployment in the snapshot."""
        entries = self._holder.current.deployments
        return next((each for each in entries if each.name == target.entry.name), None)

    def _hopeless(self, entry: DeploymentEntry) -> str:
        """Why nobody should wait: it has failed, is too dear, or its files are of no use here; "" if it may come."""
        if entry.availability is Availability.TOO_DEAR:
            return TOO_DEAR
        refused = bool(entry.workers) and all(worker in self._refused for worker in entry.workers)
        return FAILED if refused or entry.availability is Availability.FAILED else ""

    def assign(
        self, target: Target, demand: Demand, kind: tuple[int, str] | None, avoid: Collection[EngineClient]
    ) -> Assignment | None:
        """The worker of the target's deployment, as it is now, that a request should go to; None if there is none. `kind`
        (`WorkerEntry`): of the worker that has begun the sequence. Raises Superseded.
        """
        current = self._targets.get(target.entry.name)
        if current is None:
            return None
        if kind is not None:
            return current.assign(demand, lambda worker: worker.kind == kind, avoid)
        assignment = current.assign(demand, lambda worker: worker.model_version == target.version, avoid)
        if assignment is None and current.version != target.version and current.serves:
            raise Superseded(replace(current, adapter=target.adapter))
        return assignment

    async def arrival(self, timeout_s: float) -> None:
        """Wait until a worker has connected or the router stops, at most `timeout_s` seconds."""
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._arrived.wait()

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
            # Not wait_for, which in Python 3.11 loses a cancellation that arrives together with the event.
            with suppress(TimeoutError):
                async with asyncio.timeout(CHECK_EVERY_S):
                    await self._wake.wait()

    async def _reconcile(self, snapshot: Snapshot) -> None:
        wanted = {deployment.name: deployment for deployment in snapshot.deployments}
        closing: list[Awaitable[object]] = []
        for name, target in list(self._targets.items()):
            workers = wanted[name].workers if name in wanted else ()
            for worker, client in list(target.clients.items()):
                leaving = worker not in workers and client.inflight == 0
                if leaving or client.failure is not None:
                    logger.info("worker disconnected", worker=worker.worker_id, reason=client.failure or "left")
                    del target.clients[worker]
                    self._adapters.forget(worker)
                    closing.append(client.close())
            target.relieve()
            target.balancer.retain({*workers, *target.clients})
            if name not in wanted and not target.clients:
                del self._targets[name]
        self._refuse_held(wanted)
        for deployment in snapshot.deployments:
            self._start_preparing(deployment)
            for worker in deployment.workers:
                self._start_connecting(deployment, worker)
            if deployment.name in self._targets:
                self._adapters.start(self._targets[deployment.name], deployment)
        present = {worker for deployment in snapshot.deployments for worker in deployment.workers}
        self._backoffs = {worker: backoff for worker, backoff in self._backoffs.items() if worker in present}
        self._refused &= present
        self._unusable = {entry: each for entry, each in self._unusable.items() if entry in snapshot.deployments}
        self._shared = {n: shared for n, shared in self._shared.items() if n in wanted or n in self._targets}
        # Together, and after everything else: one that has vanished keeps its side open for a while.
        await asyncio.gather(*closing)

    def _start_connecting(self, deployment: DeploymentEntry, worker: WorkerEntry) -> None:
        """Connect to a worker unless that is done, being done, or to be tried later; no worker waits for another."""
        target, backoff = self._targets.get(deployment.name), self._backoffs.get(worker)
        connected = target is not None and worker in target.clients
        if connected or worker in self._connecting or (backoff and not backoff.over):
            return
        task = asyncio.ensure_future(self._connect(deployment, worker))
        self._connecting[worker] = task
        task.add_done_callback(lambda _: self._connecting.pop(worker))

    def _refuse_held(self, wanted: dict[str, DeploymentEntry]) -> None:
        """Refuse the requests that wait for deployments which will not start; release those that need not wait."""
        by_id = {entry.public_id: entry for entry in wanted.values()}
        for public_id in self.holding.deployments:
            entry = by_id.get(public_id)
            if entry is None:
                self.holding.refuse(public_id, REMOVED)
            elif reason := self._hopeless(entry):
                self.holding.refuse(public_id, reason)
            elif (target := self._targets.get(entry.name)) is not None and target.responsive:
                self.holding.release(public_id)

    def _start_preparing(self, deployment: DeploymentEntry) -> None:
        """Make the target of a deployment without workers from what its last worker said, so that it is known as it sleeps;
        and make it again if the deployment has gone back to a model version whose workers are still connected.
        """
        name = deployment.name
        unusable = self._unusable.get(deployment)
        if name in self._preparing or (unusable and not unusable.over):
            return
        made, version = self._targets.get(name), 0
        if made is None and deployment.info is not None:
            info = msgspec.msgpack.decode(deployment.info, type=ModelInfo)
        elif made is not None and (known := other_version(made, deployment)) is not None:
            info, version = made.clients[known].model, known.model_version
        else:
            return
        task = asyncio.ensure_future(self._prepare(deployment, info, version, made))
        self._preparing[name] = task
        task.add_done_callback(lambda _: self._preparing.pop(name))

    async def _prepare(self, deployment: DeploymentEntry, info: ModelInfo, version: int, made: Target | None) -> None:
        """Make the target anew, unless it is no longer the one that was `made`."""
        shared = self._shared_of(deployment)
        try:
            async with shared.loading_tokenizer:
                if self._targets.get(deployment.name) is made:
                    await self._target(deployment, info, version)
        except Exception as error:  # its files may be gone; a worker will say more
            if self._unusable.setdefault(deployment, Backoff(time.monotonic)).fail(str(error)):
                logger.warning("sleeping deployment not prepared", deployment=deployment.name, reason=str(error))

    async def _target(self, deployment: DeploymentEntry, info: ModelInfo, version: int) -> Target:
        """The deployment's target, with this description of its model version; its tokenizer is loaded if it is another one."""
        target = self._targets.get(deployment.name)
        same = (
            target is not None
            and target.info.tokenizer_file == info.tokenizer_file
            and target.info.directory == info.directory
            and target.entry.chat_template == deployment.chat_template
        )
        if target is not None and same:
            tokenizer = target.tokenizer
        else:
            tokenizer = await asyncio.to_thread(
                ModelTokenizer.load, info, self._parse_special_tokens, deployment.chat_template
            )
        clients = self._clients(deployment.name)
        # A restarted worker may have other limits than the one before it.
        made = Target(deployment, info, tokenizer, self._shared_of(deployment).balancer, self.retries, clients, version)
        self._targets[deployment.name] = made
        return made

    def _shared_of(self, deployment: DeploymentEntry) -> _Shared:
        if deployment.name not in self._shared:
            self._shared[deployment.name] = _Shared(Balancer(time.monotonic, self._random))
        return self._shared[deployment.name]

    async def _connect(self, deployment: DeploymentEntry, worker: WorkerEntry) -> None:
        shared = self._shared_of(deployment)
        observer = shared.balancer.record(worker)
        client = EngineClient(
            worker.address, worker.worker_id, worker.epoch, self._casualties, observer, self._credentials
        )
        connected = False
        try:
            info = await client.connect()
            async with shared.loading_tokenizer:  # the first of the workers that connect at once loads it
                target = await self._target(deployment, info, worker.model_version)
                target.clients[worker] = client
            connected = True
            self._backoffs.pop(worker, None)
            self._refused.discard(worker)
            self._wake.set()  # its adapters
            self._announce()
            self.holding.release(deployment.public_id)
            logger.info("worker connected", worker=worker.worker_id, deployment=deployment.name)
        except EngineDead as error:
            backoff = self._backoffs.setdefault(worker, Backoff(time.monotonic))
            if backoff.fail(str(error)):
                logger.info("worker not reachable", worker=worker.worker_id, reason=str(error))
        except Exception as error:  # any error in its files: this worker cannot be used now, others can
            backoff = self._backoffs.setdefault(worker, Backoff(time.monotonic))
            if backoff.fail(str(error)):
                logger.exception("tokenizer not usable", deployment=deployment.name, reason=str(error))
            self._refused.add(worker)
        finally:
            if not connected:
                await client.close()

    def _clients(self, deployment: str) -> dict[WorkerEntry, EngineClient]:
        """The connections to the deployment's workers now."""
        target = self._targets.get(deployment)
        return {} if target is None else target.clients
