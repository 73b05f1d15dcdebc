"""A worker that this process launched or took over, and the crashes of a deployment."""

from __future__ import annotations

import math
import signal
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import structlog
from django.utils import timezone

from engine.failures import ExitStatus
from management.autoscale.observation import WorkerState, WorkerView
from management.models import Worker

if TYPE_CHECKING:
    from collections.abc import Iterable

    from management.launchers.base import WorkerHandle, WorkerStatus
    from management.ledger import Ledger
    from management.models import Deployment

logger = structlog.get_logger(__name__)

HUNG_AFTER_S = 20.0
"""Seconds without a status report after which a worker counts as hung."""
SILENT_AFTER_S = 3.0
SILENT = f"no report for {SILENT_AFTER_S:.0f} s or longer"
"""What the row of a ready worker says that is silent and may be hung. Reports come every second."""
MAX_CRASHES = 5
LEAVING_S = 10.0
"""A worker whose machine will be taken away drains from so many seconds before, at the latest; until then its successor may get ready."""
HAND_OVER_PATIENCE_S = 5.0
"""Seconds in which a worker must give its requests to others before it is killed."""
STABLE_AFTER_S = 60.0
FIRST_PAUSE_S = 0.5
LONGEST_PAUSE_S = 30.0
FAULTS = (signal.SIGSEGV, signal.SIGBUS, signal.SIGILL, signal.SIGFPE, signal.SIGABRT, signal.SIGSYS, signal.SIGTRAP)
"""Signals that a process raises by its own fault. Before a worker is ready they would recur."""
MAX_KILLED_WHILE_LOADING = 2
"""SIGKILL usually comes from the out-of-memory killer; loading again and again would hurt every other process."""

Key = tuple[int, int, int]
"""Deployment id, index and epoch."""


@dataclass(slots=True)
class Watched:
    """One incarnation of a worker. Times are monotonic seconds of this process."""

    worker: Worker
    handle: WorkerHandle
    ledger: Ledger
    launched_at: float
    since: float
    """When it entered its state."""
    draining_since: float | None = None
    handed_over: bool = False
    """Whether it was told to give its unfinished requests to other workers."""
    reason: str = ""
    ready_since: float | None = None
    silent_s: float = 0.0
    """Seconds since its last report, without time in which this process was suspended."""
    leaves_at: float | None = None
    """When its machine will be taken away, if that is known."""

    @property
    def spare(self) -> bool:
        """Whether it waits until another worker is wanted, and takes no requests."""
        return self.worker.spare

    @property
    def key(self) -> Key:
        """Deployment, index and epoch."""
        return self.worker.deployment_id, self.worker.index, self.worker.epoch

    @property
    def name(self) -> str:
        """The key as the autoscaler's text."""
        return f"{self.worker.index}.{self.worker.epoch}"

    @property
    def ready(self) -> bool:
        """Whether it takes requests."""
        return self.worker.state == Worker.State.READY

    @property
    def loading(self) -> bool:
        """Whether it is not ready yet."""
        return self.worker.state in (Worker.State.STARTING, Worker.State.LOADING)

    def is_current(self, deployment: Deployment) -> bool:
        """Whether the worker was launched with the deployment's desired version and options, on a machine that stays."""
        return (
            self.leaves_at is None
            and self.worker.version_id == deployment.version_id
            and self.worker.engine_options == deployment.engine_options
        )

    def view(self, running: int) -> WorkerView:
        """The worker as the autoscaler sees it. `running`: its unfinished requests, as far as web processes report them."""
        state = WorkerState.STARTING if self.loading else WorkerState.READY
        if self.draining_since is not None:
            # It exits by itself after its last request, which no web process knows better.
            state, running = WorkerState.DRAINING, 1
        elif self.spare:
            state = WorkerState.SPARE
        return WorkerView(
            key=self.name,
            state=state,
            since=self.since,
            running=running,
            price_per_hour=self.worker.price_per_hour,
            launched_at=self.launched_at,
        )

    def listen(self, reports: list[WorkerStatus], awake_s: float) -> None:
        """Count the seconds without a report, and let the row of a ready worker say so, and when it reports again."""
        self.silent_s = 0.0 if reports else self.silent_s + awake_s
        silent = SILENT if self.silent_s > SILENT_AFTER_S else ""
        if self.ready and silent != self.worker.reason:
            self.write(reason=silent)

    def limit_drain(self, patience_s: float) -> None:
        """End a drain that takes longer: first its requests go to other workers, then it is killed. It is told to hand them over again
        with each pass, because signals that arrive together are one.
        """
        since = self.draining_since or 0.0
        drained_s = time.monotonic() - since
        if self.leaves_at is not None:
            patience_s = min(patience_s, self.leaves_at - HAND_OVER_PATIENCE_S - since)
        if self.handed_over and drained_s > patience_s + HAND_OVER_PATIENCE_S:
            self.handle.kill()
        elif self.handed_over or drained_s > patience_s:
            self.handed_over = True
            self.handle.hand_over()

    def heed(self, status: WorkerStatus) -> None:
        """Note what a report says of the worker's state, place and reason."""
        worker = self.worker
        if status.address:
            self.write(address=status.address, node=status.node)
        if status.leaves_in_s is not None:
            self.leaves_at = time.monotonic() + status.leaves_in_s
            logger.warning("the worker's machine leaves", worker=worker.worker_id, in_s=round(status.leaves_in_s, 1))
        if status.state == "loading" and self.draining_since is None:
            if (worker.state, worker.reason) != (Worker.State.LOADING, status.doing):
                logger.info("worker loading", worker=worker.worker_id, doing=status.doing)
                self.write(state=Worker.State.LOADING, reason=status.doing)
        elif status.state == "ready" and self.draining_since is None:
            self.ready_since = time.monotonic()
            self.write(state=Worker.State.READY, reason="", ready_at=timezone.now())
            self.ledger.note_model(worker.deployment_id, status.model)
            logger.info("worker ready", worker=worker.worker_id, epoch=worker.epoch)
        elif status.reason:
            self.reason = status.reason

    def write(self, **fields: object) -> None:
        """Set observed fields of the worker and queue them to be written."""
        if "state" in fields and fields["state"] != self.worker.state:
            self.since = time.monotonic()
        for name, value in fields.items():
            setattr(self.worker, name, value)
        self.ledger.note(self.worker, *fields)


@dataclass(slots=True)
class Crashes:
    """The consecutive crashes of a deployment in one generation."""

    generation: int = 0
    count: int = 0
    """Until a worker has been ready for a while; the pauses grow with it."""
    unserved: int = 0
    """Until a request is served; too many are given up."""
    last_at: float = -math.inf
    killed_while_loading: int = 0
    failed_launches: int = 0
    next_launch: float = 0.0
    failed: str | None = None
    """Why this generation has failed; the row may not be written yet."""
    reason: str = ""
    """Why it cannot launch a worker at the moment."""
    late: str = ""
    """Why an outdated worker was not replaced, until one is."""
    of_ready: list[str] = field(default_factory=list)
    """Names of ready workers that died since the autoscaler's last tick."""

    def note(self, watched: Watched, code: int, reason: str, served_at: float) -> None:
        """Record the unintended end of a worker. `served_at`: when the deployment last served a request."""
        now = time.monotonic()
        if served_at > self.last_at:
            self.unserved = 0
        self.unserved, self.last_at = self.unserved + 1, now
        if watched.ready_since is not None:
            self.of_ready.append(watched.name)
            if now - watched.ready_since > STABLE_AFTER_S:
                self.count = self.unserved = 0
        self.count += 1
        self.next_launch = now + pause_s(self.count)
        if watched.ready_since is not None:
            self.killed_while_loading = 0
        elif code == -signal.SIGKILL:
            self.killed_while_loading += 1
        self.failed = self._failure(code, watched.ready_since is not None, reason) or self.failed

    def pause(self) -> None:
        """Let the next launch wait, longer after each failure."""
        self.failed_launches += 1
        self.next_launch = time.monotonic() + pause_s(self.failed_launches)

    def note_launch_failure(self, text: str) -> None:
        """Record that no worker could be launched; it is tried again later."""
        self.pause()
        self.reason = f"a worker could not be launched: {text}"

    def _failure(self, code: int, was_ready: bool, reason: str) -> str | None:
        """Why the deployment fails after a worker ended with this exit code; None: launch another worker."""
        if code == ExitStatus.MODEL_REFUSED:
            return reason
        if not was_ready and -code in FAULTS:
            return f"the worker was killed by {signal.Signals(-code).name} while loading and verifying the model"
        if self.killed_while_loading >= MAX_KILLED_WHILE_LOADING:
            return f"{self.killed_while_loading} workers were killed while loading the model; is there enough memory for it?"
        return f"{self.unserved} crashes in a row, the last: {reason}" if self.unserved >= MAX_CRASHES else None


def serving_of(deployment: Deployment, mine: Iterable[Watched]) -> tuple[list[Watched], list[Watched]]:
    """The workers that stay, and those of them that were launched with another version or other options."""
    serving = [watched for watched in mine if watched.draining_since is None]
    return serving, [watched for watched in serving if not watched.is_current(deployment)]


def is_replacing(deployment: Deployment, serving: Iterable[Watched]) -> bool:
    """Whether a worker with the desired version and options is not ready yet."""
    return any(watched.loading and watched.is_current(deployment) for watched in serving)


def replacements_of(deployment: Deployment, mine: Iterable[Watched], target: int) -> list[Watched]:
    """The workers beyond `target` that load only to take outdated ones' places, the latest launched. The scaling rules do not count
    them.
    """
    serving, outdated = serving_of(deployment, mine)
    if not outdated:
        return []
    coming = [w for w in serving if w.loading and not w.spare and w.is_current(deployment)]
    surplus = sum(not w.spare for w in serving) - target
    return coming[max(0, len(coming) - max(0, surplus)) :]


def pause_s(failures: int) -> float:
    """Seconds before the next launch: exponential backoff."""
    return min(FIRST_PAUSE_S * 2.0 ** min(failures - 1, 10), LONGEST_PAUSE_S)


def hang_reason(silent_s: float, reports: list[WorkerStatus]) -> str | None:
    """Why the worker counts as hung: it sends no reports, or reports no progress. None if it does not."""
    if silent_s > HUNG_AFTER_S:
        return f"no heartbeat for {HUNG_AFTER_S:.0f} s"
    if reports and reports[-1].hangs:
        return f"hung while {reports[-1].doing}, for {reports[-1].quiet_s:.0f} s"
    return None
