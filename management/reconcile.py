"""The reconciler: brings the running workers into line with the desired state, and records the observed state.

One pass: (1) observe every launched worker, (2) converge each deployment to its desired number of workers, (3) record
each deployment's observed state, (4) publish the snapshot. A pass needs no database: `management.ledger` holds the
desired state as last read, and writes the observed state when it can.

A model that cannot be served, or whose process crashes before it is ready, fails its deployment at once, with the reason.
A worker that crashes later is restarted after growing pauses; too many crashes in a row fail the deployment. Starting the
deployment again resets the count. A launch that fails (no memory, no processes) is not the model's fault: it is retried
for as long as the deployment should run.
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
"""Seconds without a status report after which a worker counts as hung."""
AWAKE_S = 1.0
"""The most seconds that one pass counts as silence: beyond that this process, or its machine, was suspended."""
DRAIN_PATIENCE_S = 60.0
"""Seconds that a worker may drain; then it hands its requests over."""
HAND_OVER_PATIENCE_S = 10.0
"""Seconds that this may take; then the worker is killed, and its requests go on elsewhere after that death."""
MAX_CRASHES = 5
STABLE_AFTER_S = 60.0
FIRST_PAUSE_S = 0.5
LONGEST_PAUSE_S = 30.0
FAULTS = (signal.SIGSEGV, signal.SIGBUS, signal.SIGILL, signal.SIGFPE, signal.SIGABRT, signal.SIGSYS, signal.SIGTRAP)
"""Signals that a process raises by its own fault. Before a worker is ready they would recur."""
MAX_KILLED_WHILE_LOADING = 2
"""SIGKILL usually comes from the out-of-memory killer; loading again and again would hurt every other process."""


@dataclass(slots=True)
class _Crashes:
    """The consecutive crashes of a deployment in one generation."""

    generation: int = 0
    count: int = 0
    killed_while_loading: int = 0
    failed_launches: int = 0
    next_launch: float = 0.0
    failed: str | None = None
    """Why this generation has failed; the row may not be written yet."""
    reason: str = ""
    """Why it cannot launch a worker at the moment."""


@dataclass(slots=True)
class _Watched:
    """A worker that this reconciler launched."""

    worker: Worker
    handle: WorkerHandle
    ledger: Ledger
    draining_since: float | None = None
    hands_over: bool = False
    reason: str = ""
    ready_since: float | None = None
    silent_s: float = 0.0
    """Seconds since its last report, without time in which this process was suspended."""

    @property
    def key(self) -> tuple[int, int, int]:
        """Deployment, index and epoch."""
        return self.worker.deployment_id, self.worker.index, self.worker.epoch

    def write(self, **fields: object) -> None:
        """Set observed fields of the worker and queue them to be written."""
        for name, value in fields.items():
            setattr(self.worker, name, value)
        self.ledger.note(self.worker, *fields)


@dataclass(slots=True)
class Reconciler:
    """The reconciliation loop and its state between passes."""

    launcher: Launcher
    holder: SnapshotHolder
    cache_dir: str
    _last_pass: float = field(default_factory=time.monotonic)
    ledger: Ledger = field(default_factory=Ledger)
    watched: dict[tuple[int, int, int], _Watched] = field(default_factory=dict)
    """By (deployment id, index, epoch), in launch order."""
    _crashes: dict[int, _Crashes] = field(default_factory=lambda: defaultdict(_Crashes))

    def forget_earlier_workers(self) -> None:
        """Mark workers of an earlier server process as exited. Raises `django.db.Error`."""
        self.ledger.forget_earlier_workers()

    def reconcile_once(self) -> None:
        """Read the registries, run one pass, write the observed state. Raises `django.db.Error`."""
        self.ledger.read()
        self.step()
        self.ledger.write()

    def step(self) -> None:
        """Run one pass, as described at the top of this file."""
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
        """A snapshot of the registries as last read and of the workers that are ready now."""
        workers = [watched.worker for watched in list(self.watched.values())]
        ready = [worker for worker in workers if worker.state == Worker.State.READY]
        return build_snapshot(self.ledger.registries or Registries(), ready)

    def refresh(self) -> None:
        """Read the registries and publish a snapshot. Thread-safe; raises `django.db.Error`."""
        self.ledger.read()
        self.holder.refresh(self.snapshot)

    def observed(self, row: Deployment) -> Observed:
        """A deployment's observed state, which may be newer than its row. Thread-safe."""
        seen = self.ledger.observed.get(row.pk)
        return seen or Observed(row.observed_generation, row.state, row.reason)

    def failure(self) -> tuple[str, str] | None:
        """Name and reason of a deployment that should run and has failed, or None."""
        for row in self.ledger.registries.deployments if self.ledger.registries else ():
            seen = self.observed(row)
            if row.replicas and (seen.generation, seen.state) == (row.generation, str(Deployment.State.FAILED)):
                return row.name, seen.reason
        return None

    def run(self, stop: threading.Event) -> None:
        """Run passes until `stop` is set. A second thread reads and writes the database, so that no pass waits for it."""
        follower = threading.Thread(
            target=self.ledger.follow, args=(stop, lambda: self.holder.refresh(self.snapshot)), name="ledger"
        )
        follower.start()
        pause = INTERVAL_S
        while not stop.wait(pause):
            try:
                self.step()
                pause = INTERVAL_S
            except Exception:  # the loop must survive any error of one pass
                pause = min(pause * 2, 5.0)
                logger.exception("reconcile pass failed")
        follower.join()

    def _observe(self, key: tuple[int, int, int], awake_s: float) -> None:
        """Read a worker's reports and exit code. `awake_s`: seconds since the last call, suspended time excluded."""
        watched = self.watched[key]
        worker, handle = watched.worker, watched.handle
        code = handle.exit_code()  # before the reports, so that the last ones are not missed
        reports = handle.statuses()
        watched.silent_s = 0.0 if reports else watched.silent_s + awake_s
        for status in reports:
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
        elif watched.draining_since is not None:
            _hurry(watched, time.monotonic() - watched.draining_since)
        elif worker.state == Worker.State.READY and (hang := _hang_reason(watched.silent_s, reports)):
            watched.reason = hang
            logger.error("worker hung, killing it", worker=worker.worker_id, reason=hang)
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
            crashes.killed_while_loading = 0
        elif code == -signal.SIGKILL:
            crashes.killed_while_loading += 1
        text = _failure_reason(crashes, code, watched.ready_since is not None, reason)
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
        desired = 0 if failed else deployment.replicas
        if self.observed(deployment).generation != deployment.generation:  # started again: replace outdated workers
            for stale in [w for w in serving if not _is_current(w.worker, deployment)]:
                self._drain(stale)
                serving.remove(stale)
        for extra in serving[desired:]:
            self._drain(extra)
        if len(serving) < desired and time.monotonic() >= crashes.next_launch:
            taken = {w.worker.index for w in serving}
            free = [index for index in range(desired) if index not in taken]
            for index in free[: desired - len(serving)]:
                launched = self._launch(deployment, index, crashes)
                if launched is None:
                    break
                mine.append(launched)
        self._note_state(deployment, mine, desired, crashes)

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
        except msgspec.ValidationError as error:  # options that an earlier release stored
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

    def _note_state(self, deployment: Deployment, mine: list[_Watched], desired: int, crashes: _Crashes) -> None:
        ready = sum(w.worker.state == Worker.State.READY for w in mine)
        reason = ""
        if deployment.replicas and not desired:
            state, reason = str(Deployment.State.FAILED), crashes.failed or deployment.reason
        elif desired:
            state = str(Deployment.State.READY if ready >= desired else Deployment.State.STARTING)
            doing = next((w.worker.reason for w in mine if w.worker.state == Worker.State.LOADING), "")
            reason = "" if ready >= desired else doing or crashes.reason
        else:
            state = str(Deployment.State.STOPPING if mine else Deployment.State.STOPPED)
        self.ledger.observed[deployment.pk] = Observed(deployment.generation, state, reason)


def _failed(deployment: Deployment) -> bool:
    """Whether the row says that this generation has failed, as an earlier server process may have written."""
    current = deployment.observed_generation == deployment.generation
    return current and deployment.state == Deployment.State.FAILED


def _pause(failures: int) -> float:
    """Seconds before the next launch: exponential backoff."""
    return min(FIRST_PAUSE_S * 2.0 ** min(failures - 1, 10), LONGEST_PAUSE_S)


def _failure_reason(crashes: _Crashes, code: int, was_ready: bool, reason: str) -> str | None:
    """Why the deployment fails after one of its workers ended with this exit code; None: launch another worker."""
    if code == ExitStatus.MODEL_REFUSED:
        return reason
    if not was_ready and -code in FAULTS:
        return f"the worker was killed by {signal.Signals(-code).name} while loading and verifying the model"
    if crashes.killed_while_loading >= MAX_KILLED_WHILE_LOADING:
        return f"{crashes.killed_while_loading} workers were killed while loading the model; is there enough memory for it?"
    return f"{crashes.count} crashes in a row, the last: {reason}" if crashes.count >= MAX_CRASHES else None


def _hang_reason(silent_s: float, reports: list[WorkerStatus]) -> str | None:
    """Why the worker counts as hung: it sends no reports, or reports no progress. None if it does not."""
    if silent_s > HUNG_AFTER_S:
        return f"no heartbeat for {HUNG_AFTER_S:.0f} s"
    if reports and reports[-1].hangs:
        return f"hung while {reports[-1].doing}, for {reports[-1].quiet_s:.0f} s"
    return None


def _hurry(watched: _Watched, draining_s: float) -> None:
    """End a worker that has been draining for too long: first it hands its requests over, then it is killed."""
    if draining_s > DRAIN_PATIENCE_S + HAND_OVER_PATIENCE_S:
        watched.handle.kill()
    elif draining_s > DRAIN_PATIENCE_S and not watched.hands_over:
        watched.hands_over = True
        logger.info("worker hands its requests over", worker=watched.worker.worker_id)
        watched.handle.hand_over()


def _is_current(worker: Worker, deployment: Deployment) -> bool:
    """Whether the worker was launched with the deployment's desired version and options."""
    return worker.version_id == deployment.version_id and worker.engine_options == deployment.engine_options
