"""Makes desired state true: launches, watches, restarts and drains workers, and writes what it observes.

One pass: (1) observe every launched worker, (2) bring each deployment nearer to its desired number of workers,
(3) write each deployment's observed state, (4) publish the snapshot. A model that cannot be served fails its
deployment at once, with the reason; a worker that crashes is restarted with growing pauses, and its deployment fails
after too many crashes in a row. Starting the deployment again gives it a fresh chance.
"""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import msgspec
import structlog
from django.db import DatabaseError, close_old_connections
from django.db.models import Max
from django.utils import timezone

from engine.config import EngineConfig
from management.models import Deployment, Model, Worker
from management.services.snapshots import build_snapshot

if TYPE_CHECKING:
    from management.launchers.base import Launcher, WorkerHandle, WorkerStatus
    from management.snapshot import SnapshotHolder

logger = structlog.get_logger(__name__)

INTERVAL_S = 0.25
MODEL_UNSERVABLE = 3
"""The exit status of a worker whose model cannot be served (see `engine.__main__`)."""
HUNG_AFTER_S = 20.0
"""After so many seconds without a report."""
AWAKE_S = 1.0
"""The most that one pass counts: what lies between two passes beyond that is this process's own sleep, or its machine's."""
DRAIN_PATIENCE_S = 60.0
MAX_CRASHES = 5
STABLE_AFTER_S = 60.0
FIRST_PAUSE_S = 0.5


@dataclass(slots=True)
class _Crashes:
    """A deployment's crashes in a row, of one generation."""

    generation: int = 0
    count: int = 0
    next_launch: float = 0.0


@dataclass(slots=True)
class _Watched:
    """A worker that this reconciler launched."""

    worker: Worker
    handle: WorkerHandle
    draining_since: float | None = None
    reason: str = ""
    ready_since: float | None = None
    silent_s: float = 0.0
    """Since its last report, in time that this process was awake."""
    reports: list[WorkerStatus] = field(default_factory=list)
    unsaved: set[str] = field(default_factory=set)
    """Fields of the row that are newer than the database, which may have been away."""

    def write(self, **fields: object) -> None:
        """Note what was observed, and save it now or in a later pass."""
        for name, value in fields.items():
            setattr(self.worker, name, value)
        self.unsaved |= set(fields)
        self.save()

    def save(self) -> None:
        """Bring the row up to date."""
        if self.unsaved:
            self.worker.save(update_fields=sorted(self.unsaved))
            self.unsaved.clear()


@dataclass(slots=True)
class Reconciler:
    """The loop's state between passes."""

    launcher: Launcher
    holder: SnapshotHolder
    cache_dir: str
    _last_pass: float = field(default_factory=time.monotonic)
    watched: dict[int, _Watched] = field(default_factory=dict)
    _crashes: dict[int, _Crashes] = field(default_factory=lambda: defaultdict(_Crashes))

    def forget_earlier_workers(self) -> None:
        """Workers of an earlier process of ours died with it."""
        rows = Worker.objects.filter(state__in=Worker.LIVE)
        rows.update(state=Worker.State.EXITED, reason="the server stopped", ended_at=timezone.now())

    def reconcile_once(self) -> None:
        """One pass, as described at the top of this file."""
        now = time.monotonic()
        awake_s, self._last_pass = min(now - self._last_pass, AWAKE_S), now
        for pk in list(self.watched):
            self._observe(pk, awake_s)
        for deployment in Deployment.objects.select_related("version__model"):
            self._converge(deployment)
        self.holder.refresh(build_snapshot)

    def run(self, stop: threading.Event) -> None:
        """Pass after pass until `stop`. A database that is away is waited for; workers go on meanwhile."""
        pause = INTERVAL_S
        while not stop.wait(pause):
            try:
                self.reconcile_once()
                pause = INTERVAL_S
            except DatabaseError as error:
                pause = min(pause * 2, 5.0)
                logger.warning("registry not reachable", error=str(error))
                close_old_connections()
            except Exception:  # one of the edges: whatever one pass met, the next may go well
                pause = min(pause * 2, 5.0)
                logger.exception("reconciling failed")

    def _observe(self, pk: int, awake_s: float) -> None:
        """`awake_s` have passed since the last time."""
        watched = self.watched[pk]
        worker, handle = watched.worker, watched.handle
        code = handle.exit_code()  # before its last words are read, so that none are missed
        heard = handle.statuses()
        watched.silent_s = 0.0 if heard else watched.silent_s + awake_s
        watched.reports += heard
        watched.save()
        while watched.reports:  # one that could not be written down is looked at again in the next pass
            status = watched.reports[0]
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
            del watched.reports[0]
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
        del self.watched[worker.pk]
        if intended:
            return
        logger.error("worker ended", worker=worker.worker_id, code=code, reason=reason)
        crashes = self._crashes[worker.deployment_id]
        if watched.ready_since is not None and time.monotonic() - watched.ready_since > STABLE_AFTER_S:
            crashes.count = 0
        crashes.count += 1
        crashes.next_launch = time.monotonic() + FIRST_PAUSE_S * 2 ** (crashes.count - 1)
        if code == MODEL_UNSERVABLE or crashes.count >= MAX_CRASHES:
            text = reason if code == MODEL_UNSERVABLE else f"{crashes.count} crashes in a row, the last: {reason}"
            rows = Deployment.objects.filter(pk=worker.deployment_id)
            rows.update(state=Deployment.State.FAILED, reason=text)
            logger.error("deployment failed", deployment=worker.deployment.name, reason=text)

    def _converge(self, deployment: Deployment) -> None:
        crashes = self._crashes[deployment.pk]
        if crashes.generation != deployment.generation:
            self._crashes[deployment.pk] = crashes = _Crashes(deployment.generation)
        mine = [w for w in self.watched.values() if w.worker.deployment_id == deployment.pk]
        serving = sorted((w for w in mine if w.draining_since is None), key=lambda w: w.worker.index)
        failed = deployment.state == Deployment.State.FAILED and deployment.observed_generation == deployment.generation
        wanted = 0 if failed else deployment.replicas
        if deployment.observed_generation != deployment.generation:  # started anew: workers of other wishes go
            for stale in [w for w in serving if not _as_wished(w.worker, deployment)]:
                self._drain(stale)
                serving.remove(stale)
        for extra in serving[wanted:]:
            self._drain(extra)
        if len(serving) < wanted and time.monotonic() >= crashes.next_launch:
            taken = {w.worker.index for w in serving}
            free = [index for index in range(wanted) if index not in taken]
            for index in free[: wanted - len(serving)]:
                mine.append(self._launch(deployment, index))
        if not failed or not deployment.replicas:
            self._write_state(deployment, mine, wanted)

    def _launch(self, deployment: Deployment, index: int) -> _Watched:
        latest = Worker.objects.filter(deployment=deployment, index=index).aggregate(Max("epoch"))["epoch__max"] or 0
        worker = Worker(
            deployment=deployment,
            version=deployment.version,
            engine_options=deployment.engine_options,
            index=index,
            epoch=latest + 1,
        )
        worker.socket = self.launcher.socket_path(f"{deployment.pk}-{index}-{worker.epoch}")
        config = msgspec.convert(
            {
                "task": "embed" if deployment.version.model.kind == Model.Kind.EMBEDDING else "auto",
                **deployment.engine_options,
                "model": deployment.version.source,
                "worker_id": worker.worker_id,
                "epoch": worker.epoch,
                "socket": worker.socket,
                "cache_dir": self.cache_dir,
            },
            EngineConfig,
        )
        worker.save()  # first, so that no process runs without a row
        self.watched[worker.pk] = watched = _Watched(worker, self.launcher.launch(config))
        logger.info("worker launched", worker=worker.worker_id, epoch=worker.epoch, source=deployment.version.source)
        watched.write(process_id=watched.handle.process_id)
        return watched

    def _drain(self, watched: _Watched) -> None:
        watched.draining_since = time.monotonic()
        watched.handle.drain()
        watched.write(state=Worker.State.DRAINING)

    def _write_state(self, deployment: Deployment, mine: list[_Watched], wanted: int) -> None:
        ready = sum(w.worker.state == Worker.State.READY for w in mine)
        if wanted:
            state = Deployment.State.READY if ready >= wanted else Deployment.State.STARTING
        else:
            state = Deployment.State.STOPPING if mine else Deployment.State.STOPPED
        doing = next((w.worker.reason for w in mine if w.worker.state == Worker.State.LOADING), "")
        observed = {"state": state, "reason": doing, "observed_generation": deployment.generation}
        if any(getattr(deployment, name) != value for name, value in observed.items()):
            Deployment.objects.filter(pk=deployment.pk, generation=deployment.generation).update(**observed)


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
