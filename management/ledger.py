"""The reconciler's cache of the database: the desired state as last read, and observed state that is not yet written.

The reconciler never waits for the database. While that is unreachable, full, read-only or paused, the ledger keeps the
last registries and buffers observed state. Rows serve people and the next start; no running worker depends on a write.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import structlog
from django.db import Error, IntegrityError, close_old_connections, transaction
from django.db.models import Max
from django.utils import timezone

from management.models import Deployment, Worker
from management.services.snapshots import Registries, read_registries

if TYPE_CHECKING:
    from collections.abc import Callable

logger = structlog.get_logger(__name__)

INTERVAL_S = 0.25
LONGEST_PAUSE_S = 2.0
"""The longest pause between two attempts while the database is unreachable."""


@dataclass(frozen=True, slots=True)
class Observed:
    """The observed state of a deployment in one generation (one start)."""

    generation: int
    state: str
    reason: str


@dataclass(slots=True)
class Ledger:
    """The registries as last read, and observed state that waits to be written. Thread-safe."""

    registries: Registries | None = None
    """None until the first successful read."""
    observed: dict[int, Observed] = field(default_factory=dict)
    """By deployment id; written if the row differs."""
    _epochs: dict[tuple[int, int], int] = field(default_factory=dict)
    _unwritten: dict[tuple[int, int, int], tuple[Worker, set[str]]] = field(default_factory=dict)
    """By (deployment id, index, epoch): workers with unwritten fields, or without a row; oldest first."""
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _reading: threading.Lock = field(default_factory=threading.Lock)
    _reachable: bool = True

    def forget_earlier_workers(self) -> None:
        """Mark workers of an earlier server process as exited, and continue their epochs. Raises `django.db.Error`."""
        rows = Worker.objects.filter(state__in=Worker.LIVE)
        rows.update(state=Worker.State.EXITED, reason="the server stopped", ended_at=timezone.now())
        latest = Worker.objects.order_by().values_list("deployment_id", "index").annotate(Max("epoch"))
        for deployment, index, epoch in latest:
            self._epochs[deployment, index] = max(epoch, self._epochs.get((deployment, index), 0))

    def next_epoch(self, deployment_id: int, index: int) -> int:
        """An epoch greater than all earlier ones of this deployment and index, written or not."""
        epoch = self._epochs.get((deployment_id, index), 0) + 1
        self._epochs[deployment_id, index] = epoch
        return epoch

    def note(self, worker: Worker, *fields: str) -> None:
        """Queue these fields of a worker to be written; a worker without a row gets one."""
        with self._lock:
            _merge(self._unwritten, worker, set(fields))

    def read(self) -> Registries:
        """Read the registries from the database and cache them. Raises `django.db.Error`."""
        with self._reading:  # one reader at a time, so that an older result never replaces a newer one
            self.registries = read_registries()
            return self.registries

    def write(self) -> None:
        """Write queued fields and observed states. Raises `django.db.Error`; what was not written stays queued."""
        with self._lock:
            unwritten, self._unwritten = self._unwritten, {}
        try:
            for place, (worker, fields) in list(unwritten.items()):
                _write_worker(worker, fields)
                del unwritten[place]
        finally:
            with self._lock:
                for worker, fields in self._unwritten.values():
                    _merge(unwritten, worker, fields)
                self._unwritten = unwritten
        for row in self.registries.deployments if self.registries else ():
            seen = self.observed.get(row.pk)
            if seen is None or seen.generation != row.generation:
                continue
            if (row.state, row.reason, row.observed_generation) != (seen.state, seen.reason, seen.generation):
                rows = Deployment.objects.filter(pk=row.pk, generation=row.generation)
                rows.update(state=seen.state, reason=seen.reason, observed_generation=seen.generation)

    def follow(self, stop: threading.Event, publish: Callable[[], None]) -> None:
        """Read, publish and write in a loop until `stop` is set; retries with pauses while the database is unreachable."""
        pause = INTERVAL_S
        while not stop.wait(pause):
            done = self._attempt(self.read) and self._attempt(publish) and self._attempt(self.write)
            pause = INTERVAL_S if done else min(pause * 2, LONGEST_PAUSE_S)
            if done != self._reachable:
                self._reachable = done
                logger.warning("registry reachable again" if done else "registry unreachable; workers keep running")

    def _attempt(self, step: Callable[[], object]) -> bool:
        try:
            step()
        except Error as error:
            if self._reachable:
                logger.warning("registry unreachable", error=str(error))
            close_old_connections()
            return False
        except Exception:  # the loop must survive any error of one attempt
            logger.exception("registry update failed")
            close_old_connections()
            return False
        return True


def _merge(notes: dict[tuple[int, int, int], tuple[Worker, set[str]]], worker: Worker, fields: set[str]) -> None:
    _, known = notes.setdefault((worker.deployment_id, worker.index, worker.epoch), (worker, set()))
    known |= fields


def _write_worker(worker: Worker, fields: set[str]) -> None:
    if worker.pk is not None:
        Worker.objects.filter(pk=worker.pk).update(**{name: getattr(worker, name) for name in fields})
        return
    started_at = worker.started_at
    try:
        with transaction.atomic():
            worker.save()
            # The worker may have started long before its row could be written.
            Worker.objects.filter(pk=worker.pk).update(started_at=started_at)
    except Error as error:
        worker.pk = None
        if not isinstance(error, IntegrityError):
            raise
        # The deployment was deleted meanwhile; its workers need no rows.
        logger.warning("worker row not written", worker=worker.worker_id, error=str(error))
    finally:
        worker.started_at = started_at
