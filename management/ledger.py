"""What the reconciler knows of the database and has to tell it: nothing in here makes the reconciler wait.

The registries stay as they were last read, and what was observed stays here until it is written, while the database is
away, full, read-only or paused. Rows are for people and for the next start: what runs never depends on a write.
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
"""Between two attempts while the database is away: it is noticed that soon that it is back."""


@dataclass(frozen=True, slots=True)
class Observed:
    """A deployment's observed state, of one generation."""

    generation: int
    state: str
    reason: str


@dataclass(slots=True)
class Ledger:
    """The registries as last read, and what waits to be written. Any thread may call it."""

    registries: Registries | None = None
    """None until they were read for the first time."""
    observed: dict[int, Observed] = field(default_factory=dict)
    """By deployment; written down where the row says something else."""
    _epochs: dict[tuple[int, int], int] = field(default_factory=dict)
    _unwritten: dict[tuple[int, int, int], tuple[Worker, set[str]]] = field(default_factory=dict)
    """By deployment, index and epoch: workers without a row, or with fields that are newer than it; oldest first."""
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _reading: threading.Lock = field(default_factory=threading.Lock)
    _reachable: bool = True

    def forget_earlier_workers(self) -> None:
        """Workers of an earlier process of ours died with it; those to come have later epochs. Raises `Error`."""
        rows = Worker.objects.filter(state__in=Worker.LIVE)
        rows.update(state=Worker.State.EXITED, reason="the server stopped", ended_at=timezone.now())
        latest = Worker.objects.order_by().values_list("deployment_id", "index").annotate(Max("epoch"))
        for deployment, index, epoch in latest:
            self._epochs[deployment, index] = max(epoch, self._epochs.get((deployment, index), 0))

    def next_epoch(self, deployment_id: int, index: int) -> int:
        """Later than all earlier ones in this place, whether they have a row or not."""
        epoch = self._epochs.get((deployment_id, index), 0) + 1
        self._epochs[deployment_id, index] = epoch
        return epoch

    def note(self, worker: Worker, *fields: str) -> None:
        """These fields of a worker are to be written down; a worker without a row gets one."""
        with self._lock:
            _merge(self._unwritten, worker, set(fields))

    def read(self) -> Registries:
        """The registries as they are now, which are the last read from now on; raises `Error`."""
        with self._reading:  # one at a time, so that what is older never comes after what is newer
            self.registries = read_registries()
            return self.registries

    def write(self) -> None:
        """Bring the rows up to date; raises `Error`, and what is not written then is written later."""
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
        """Read and write until `stop`; `publish` is called after each reading. A database that is away is waited for."""
        pause = INTERVAL_S
        while not stop.wait(pause):
            done = self._attempt(self.read) and self._attempt(publish) and self._attempt(self.write)
            pause = INTERVAL_S if done else min(pause * 2, LONGEST_PAUSE_S)
            if done != self._reachable:
                self._reachable = done
                logger.warning("registry up to date again" if done else "registry out of reach; workers go on without")

    def _attempt(self, step: Callable[[], object]) -> bool:
        try:
            step()
        except Error as error:
            if self._reachable:
                logger.warning("registry not reachable", error=str(error))
            close_old_connections()
            return False
        except Exception:  # one of the edges: whatever one attempt met, the next may go well
            logger.exception("registry not followed")
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
            # It may have run for a while before the row could be made.
            Worker.objects.filter(pk=worker.pk).update(started_at=started_at)
    except Error as error:
        worker.pk = None
        if not isinstance(error, IntegrityError):
            raise
        # Its deployment is gone, and with it all that a row could be good for.
        logger.warning("worker without a row", worker=worker.worker_id, error=str(error))
    finally:
        worker.started_at = started_at
