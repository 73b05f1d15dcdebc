"""Makes desired state true: launches, watches, restarts and drains workers, and writes what it observes.

One pass: (1) observe every launched worker, (2) bring each deployment nearer to its desired number of workers,
(3) note each deployment's observed state, (4) publish the snapshot. A pass needs no database: the wishes are those that
`management.ledger` read last, and what was observed is written down by it when that is possible.

A model that cannot be served, or that ends its process before it was ready, fails its deployment at once, with the
reason; a worker that crashes is restarted with growing pauses, and its deployment fails after too many crashes in a row.
Starting the deployment again gives it a fresh chance. A worker that could not even be launched is no fault of the
model's: that is tried again for as long as the deployment is wished for.
"""

from __future__ import annotations

import signal
import threading
import time
from collections import defaultdict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import msgspec
import structlog
from django.utils import timezone

from engine.config import EngineConfig
from engine.failures import ExitStatus
from management.ledger import Ledger, Observed
from management.models import Deployment, Model, Worker
from management.services.snapshots import Registries, build_snapshot

if TYPE_CHECKING:
    from management.launchers.base import Launcher, WorkerHandle, WorkerStatus
    from management.snapshot import Snapshot, SnapshotHolder

logger = structlog.get_logger(__name__)

INTERVAL_S = 0.25
HUNG_AFTER_S = 20.0
"""After so many seconds without a report."""
AWAKE_S = 1.0
"""The most that one pass counts: what lies between two passes beyond that is this process's own sleep, or its machine's."""
DRAIN_PATIENCE_S = 60.0
MAX_CRASHES = 5
STABLE_AFTER_S = 60.0
FIRST_PAUSE_S = 0.5
LONGEST_PAUSE_S = 30.0
FAULTS = (signal.SIGSEGV, signal.SIGBUS, signal.SIGILL, signal.SIGFPE, signal.SIGABRT, signal.SIGSYS, signal.SIGTRAP)
"""Signals that code brings upon its own process: before a worker was ready they would come again."""
MAX_KILLED_UNREADY = 2
"""Nobody's own fault, but where memory is short a model that is loaded again and again takes it from everybody."""


@dataclass(slots=True)
class _Crashes:
    """A deployment's crashes in a row, of one generation."""

    generation: int = 0
    count: int = 0
    killed_unready: int = 0
    failed_launches: int = 0
    next_launch: float = 0.0
    failed: str | None = None
    """Why this generation is given up; the row may not say so yet."""
    reason: str = ""
    """What keeps it from starting at the moment."""


@dataclass(slots=True)
class _Watched:
    """A worker that this reconciler launched."""

    worker: Worker
    handle: WorkerHandle
    ledger: Ledger
    draining_since: float | None = None
    reason: str = ""
    ready_since: float | None = None
    silent_s: float = 0.0
    """Since its last report, in time that this process was awake."""

    @property
    def key(self) -> tuple[int, int, int]:
        """Deployment, index and epoch."""
        return self.worker.deployment_id, self.worker.index, self.worker.epoch

    def write(self, **fields: object) -> None:
        """Note what was observed."""
        for name, value in fields.items():
            setattr(self.worker, name, value)
        self.ledger.note(self.worker, *fields)


@dataclass(slots=True)
class Reconciler:
    """The loop's state between passes."""

    launcher: Launcher
    holder: SnapshotHolder
    cache_dir: str
    _last_pass: float = field(default_factory=time.monotonic)
    ledger: Ledger = field(default_factory=Ledger)
    watched: dict[tuple[int, int, int], _Watched] = field(default_factory=dict)
    """By deployment, index and epoch, in the order of launch."""
    _crashes: dict[int, _Crashes] = field(default_factory=lambda: defaultdict(_Crashes))

    def forget_earlier_workers(self) -> None:
        """Workers of an earlier process of ours died with it."""
        self.ledger.forget_earlier_workers()

    def reconcile_once(self) -> None:
        """One pass with what the database says now, written down at its end."""
        self.ledger.read()
        self.step()
        self.ledger.write()

    def step(self) -> None:
        """One pass, as described at the top of this file."""
        now = time.monotonic()
        awake_s, self._last_pass = min(now - self._last_pass, AWAKE_S), now
        for key in list(self.watched):
            self._observe(key, awake_s)
        if self.ledger.registries is None:
            return
        deployments = self.ledger.registries.deployments
        for deployment in deployments:
            self._converge(deployment)
        known = {deployment.pk for deployment in deployments}
        for watched in list(self.watched.values()):
            if watched.worker.deployment_id not in known and watched.draining_since is None:
                self._drain(watched)
        self.holder.refresh(self.snapshot)

    def snapshot(self) -> Snapshot:
        """The registries as they were last read, with the workers that are ready now."""
        workers = [watched.worker for watched in list(self.watched.values())]
        ready = [worker for worker in workers if worker.state == Worker.State.READY]
        return build_snapshot(self.ledger.registries or Registries(), ready)

    def refresh(self) -> None:
        """Read the registries and publish; any thread may call this. Raises `django.db.Error`."""
        self.ledger.read()
        self.holder.refresh(self.snapshot)

    def observed(self, row: Deployment) -> Observed:
        """A deployment's state, which the row may not say yet; any thread may call this."""
        seen = self.ledger.observed.get(row.pk)
        return seen or Observed(row.observed_generation, row.state, row.reason)

    def failure(self) -> tuple[str, str] | None:
        """A deployment that should serve and is given up: its name, and why."""
        for row in self.ledger.registries.deployments if self.ledger.registries else ():
            seen = self.observed(row)
            if row.replicas and (seen.generation, seen.state) == (row.generation, str(Deployment.State.FAILED)):
                return row.name, seen.reason
        return None

    def run(self, stop: threading.Event) -> None:
        """Pass after pass until `stop`; a thread beside it follows the database, so that none waits for it."""
        follower = threading.Thread(
            target=self.ledger.follow, args=(stop, lambda: self.holder.refresh(self.snapshot)), name="ledger"
        )
        follower.start()
        pause = INTERVAL_S
        while not stop.wait(pause):
            try:
                self.step()
                pause = INTERVAL_S
            except Exception:  # one of the edges: whatever one pass met, the next may go well
                pause = min(pause * 2, 5.0)
                logger.exception("reconciling failed")
        follower.join()

    def _observe(self, key: tuple[int, int, int], awake_s: float) -> None:
        """`awake_s` have passed since the last time."""
        watched = self.watched[key]
        worker, handle = watched.worker, watched.handle
        code = handle.exit_code()  # before its last words are read, so that none are missed
        heard = handle.statuses()
        watched.silent_s = 0.0 if heard else watched.silent_s + awake_s
        for status in heard:
            if status.state == "loading":
                if (worker.state, worker.reason) != (Worker.State.LOADING, status.doing):
                    logger.info("worker loading", worker=worker.worker_id, doing=status.doing)
                    watched.write(state=Worker.State.LOADING, reason=status.doing)
            elif status.state == "ready":
                watched.ready_since = time.monotonic()
                watched.write(state=Worker.State.READY, reason="", ready_at=timezone.now())
                logger.info("worker ready", worker=worker.worker_id, epoch=worker.epoch)
            elif status.reason:
                watched.reason = status.reason
        if code is not None:
            self._ended(watched, code)
        elif watched.draining_since is not None and time.monotonic() - watched.draining_since > DRAIN_PATIENCE_S:
            handle.kill()
        elif worker.state == Worker.State.READY and (hang := _hang(watched.silent_s, heard)):
            watched.reason = hang
            logger.error("worker hung; killed", worker=worker.worker_id, reason=hang)
            handle.kill()

    def _ended(self, watched: _Watched, code: int) -> None:
        worker = watched.worker
        intended = watched.draining_since is not None
        reason = watched.reason or (f"killed by signal {-code}" if code < 0 else f"exit status {code}")
        state = Worker.State.EXITED if intended or code == 0 else Worker.State.FAILED
        watched.write(state=state, reason=reason, ended_at=timezone.now())
        del self.watched[watched.key]
        if intended:
            return
        logger.error("worker ended", worker=worker.worker_id, code=code, reason=reason)
        crashes = self._crashes[worker.deployment_id]
        if watched.ready_since is not None and time.monotonic() - watched.ready_since > STABLE_AFTER_S:
            crashes.count = 0
        crashes.count += 1
        crashes.next_launch = time.monotonic() + _pause(crashes.count)
        if watched.ready_since is not None:
            crashes.killed_unready = 0
        elif code == -signal.SIGKILL:
            crashes.killed_unready += 1
        text = _hopeless(crashes, code, watched.ready_since is not None, reason)
        if text is not None:
            crashes.failed = text
            logger.error("deployment failed", deployment=worker.deployment.name, reason=text)

    def _converge(self, deployment: Deployment) -> None:
        crashes = self._crashes[deployment.pk]
        if crashes.generation != deployment.generation:
            self._crashes[deployment.pk] = crashes = _Crashes(deployment.generation)
        mine = [w for w in self.watched.values() if w.worker.deployment_id == deployment.pk]
        serving = sorted((w for w in mine if w.draining_since is None), key=lambda w: w.worker.index)
        failed = crashes.failed is not None or _failed(deployment)
        wanted = 0 if failed else deployment.replicas
        if self.observed(deployment).generation != deployment.generation:  # started anew: workers of other wishes go
            for stale in [w for w in serving if not _as_wished(w.worker, deployment)]:
                self._drain(stale)
                serving.remove(stale)
        for extra in serving[wanted:]:
            self._drain(extra)
        if len(serving) < wanted and time.monotonic() >= crashes.next_launch:
            taken = {w.worker.index for w in serving}
            free = [index for index in range(wanted) if index not in taken]
            for index in free[: wanted - len(serving)]:
                launched = self._launch(deployment, index, crashes)
                if launched is None:
                    break
                mine.append(launched)
        self._note_state(deployment, mine, wanted, crashes)

    def _launch(self, deployment: Deployment, index: int, crashes: _Crashes) -> _Watched | None:
        worker = Worker(
            deployment=deployment,
            version=deployment.version,
            engine_options=deployment.engine_options,
            index=index,
            epoch=self.ledger.next_epoch(deployment.pk, index),
            started_at=timezone.now(),
        )
        worker.address = self.launcher.address(f"{deployment.pk}-{index}-{worker.epoch}")
        options = {
            "task": "embed" if deployment.version.model.kind == Model.Kind.EMBEDDING else "auto",
            **deployment.engine_options,
            "model": deployment.version.source,
            "worker_id": worker.worker_id,
            "epoch": worker.epoch,
            "address": worker.address,
            "cache_dir": self.cache_dir,
        }
        try:
            handle = self.launcher.launch(msgspec.convert(options, EngineConfig))
        except msgspec.ValidationError as error:  # options of an earlier release
            crashes.failed = f"engine_options: {error}"
            logger.error("deployment failed", deployment=deployment.name, reason=crashes.failed)
            return None
        except OSError as error:
            crashes.failed_launches += 1
            crashes.next_launch = time.monotonic() + _pause(crashes.failed_launches)
            crashes.reason = f"a worker could not be launched: {error.strerror or error}"
            logger.error("worker not launched", worker=worker.worker_id, error=str(error))
            return None
        crashes.failed_launches, crashes.reason = 0, ""
        watched = _Watched(worker, handle, self.ledger)
        self.watched[watched.key] = watched
        logger.info("worker launched", worker=worker.worker_id, epoch=worker.epoch, source=deployment.version.source)
        watched.write(process_id=handle.process_id)
        return watched

    def _drain(self, watched: _Watched) -> None:
        watched.draining_since = time.monotonic()
        watched.handle.drain()
        watched.write(state=Worker.State.DRAINING)

    def _note_state(self, deployment: Deployment, mine: list[_Watched], wanted: int, crashes: _Crashes) -> None:
        ready = sum(w.worker.state == Worker.State.READY for w in mine)
        reason = ""
        if deployment.replicas and not wanted:
            state, reason = str(Deployment.State.FAILED), crashes.failed or deployment.reason
        elif wanted:
            state = str(Deployment.State.READY if ready >= wanted else Deployment.State.STARTING)
            doing = next((w.worker.reason for w in mine if w.worker.state == Worker.State.LOADING), "")
            reason = "" if ready >= wanted else doing or crashes.reason
        else:
            state = str(Deployment.State.STOPPING if mine else Deployment.State.STOPPED)
        self.ledger.observed[deployment.pk] = Observed(deployment.generation, state, reason)


def _failed(deployment: Deployment) -> bool:
    """Whether the row says that this generation is given up, as an earlier process of ours may have written."""
    current = deployment.observed_generation == deployment.generation
    return current and deployment.state == Deployment.State.FAILED


def _pause(failures: int) -> float:
    """Seconds before the next launch."""
    return min(FIRST_PAUSE_S * 2.0 ** min(failures - 1, 10), LONGEST_PAUSE_S)


def _hopeless(crashes: _Crashes, code: int, was_ready: bool, reason: str) -> str | None:
    """Why the deployment is given up, after a worker of it ended with this exit code; None: another worker may do better."""
    if code == ExitStatus.MODEL_REFUSED:
        return reason
    if not was_ready and -code in FAULTS:
        return f"the worker was ended by {signal.Signals(-code).name} while it loaded and proved the model"
    if crashes.killed_unready >= MAX_KILLED_UNREADY:
        return (
            f"{crashes.killed_unready} workers were killed while they loaded the model; is there enough memory for it?"
        )
    return f"{crashes.count} crashes in a row, the last: {reason}" if crashes.count >= MAX_CRASHES else None


def _hang(silent_s: float, heard: list[WorkerStatus]) -> str | None:
    """Why the worker is taken for hung: no report for so many seconds, or one that it does not move on."""
    if silent_s > HUNG_AFTER_S:
        return f"no heartbeat for {HUNG_AFTER_S:.0f} s"
    if heard and heard[-1].hangs:
        return f"hung while {heard[-1].doing}, for {heard[-1].quiet_s:.0f} s"
    return None


def _as_wished(worker: Worker, deployment: Deployment) -> bool:
    """Whether it was launched with what the deployment wants now."""
    return worker.version_id == deployment.version_id and worker.engine_options == deployment.engine_options
