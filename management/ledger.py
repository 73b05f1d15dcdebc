"""The reconciler's cache of the database: the desired state as last read, and observed state that is not yet written.

The reconciler never waits for the database. While that is unreachable, full, read-only or paused, the ledger keeps the
last registries and buffers observed state. Rows serve people and the next start; no running worker depends on a write.
"""

from __future__ import annotations

import os
import threading
import time
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import msgspec
import psutil
import structlog
from django.db import Error, IntegrityError, close_old_connections, transaction
from django.db.models import Exists, Max, OuterRef
from django.db.models.functions import Now
from django.utils import timezone

from engine.process.cpus import usable_cpus
from management import changes
from management.adapter_store import sweep_store
from management.database_errors import one_line
from management.leadership import LeadershipLost
from management.models import AdapterVersion, Deployment, Node, WebProcess, Worker
from management.offload_folders import sweep_offload_folders
from management.services import audit
from management.services.snapshots import Registries, read_registries

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from engine.messages import ModelInfo
    from management.leadership import Leadership
    from management.stored_loads import StoredLoads

logger = structlog.get_logger(__name__)

INTERVAL_S = 0.25
COST_STEP = 0.001
"""USD by which the cost must have grown to be written on its own."""
KEEP_DELETED = timedelta(hours=24)
"""How long the record of a deleted deployment is kept."""
KEEP_ENDED = timedelta(days=7)
"""How long the record of an ended worker is kept; the last one of its index is kept longer, for its epoch."""
SILENT_FOR = timedelta(seconds=60)
"""A web process that has not reported for so long has ended without signing off."""
HOUSEKEEPING_S = 30.0
LONGEST_PAUSE_S = 2.0
"""The longest pause between two attempts while the database is unreachable."""


@dataclass(frozen=True, slots=True)
class Observed:
    """The observed state of a deployment in one generation. Prices and cost are in USD."""

    generation: int
    state: str
    reason: str
    target_workers: int = 0
    scale_blocked: str = ""
    price_per_hour: float = 0.0
    cost: float = 0.0

    @classmethod
    def of(cls, row: Deployment) -> Observed:
        """What the row says."""
        return cls(
            row.observed_generation,
            row.state,
            row.reason,
            row.target_workers,
            row.scale_blocked,
            row.price_per_hour,
            row.cost,
        )

    @property
    def reached(self) -> tuple[int, str, str]:
        """The generation, the state that it is in and the limit that keeps it from growing, read at one moment."""
        return self.generation, self.state, self.scale_blocked

    def differs_from(self, row: Deployment) -> bool:
        """Whether it must be written. Cost alone is written only as often as COST_STEP says."""
        seen = Observed.of(row)
        return replace(self, cost=0.0) != replace(seen, cost=0.0) or self.cost - seen.cost > COST_STEP


@dataclass(frozen=True, slots=True)
class Found:
    """The live workers that were recorded when this process began to lead in this epoch."""

    epoch: int
    workers: tuple[Worker, ...]


@dataclass(slots=True)
class Ledger:
    """The registries as last read, and observed state that waits to be written. Thread-safe."""

    leadership: Leadership | None = None
    """Set if this process acts only while it leads; its writes are fenced."""
    standing: Leadership | None = None
    """The lease of a process that acts in any case, held so that no other reconciler does."""
    registries: Registries | None = None
    """None until the first successful read."""
    loads: StoredLoads | None = None
    """The reports of other processes; None if there are none."""
    found: Found | None = None
    """What there was when this process began to lead; None until it is read. Of an earlier epoch, it is out of date."""
    observed: dict[int, Observed] = field(default_factory=dict)
    """By deployment id; written if the row differs."""
    _epochs: dict[tuple[str, int], int] = field(default_factory=dict)
    """By a deployment's name and an index: a name may come again while workers of the deleted deployment still run."""
    _models: dict[int, bytes] = field(default_factory=dict)
    _decisions: list[tuple[str, dict[str, object]]] = field(default_factory=list)
    _kept_at: float = 0.0
    _version: object = None
    """The database's version that `read_changes` has seen."""
    _unwritten: dict[tuple[int, int, int], tuple[Worker, set[str]]] = field(default_factory=dict)
    """By (deployment id, index, epoch): workers with unwritten fields, or without a row; oldest first."""
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _reading: threading.Lock = field(default_factory=threading.Lock)
    reachable: bool = True
    """Whether the database could be used when it was last tried."""

    @property
    def displaced(self) -> bool:
        """Whether this process acts alone, and another has taken its lease: it was suspended for longer than that lasts."""
        return self.standing is not None and not self.standing.epoch

    def forget_earlier_workers(self) -> None:
        """Mark workers of an earlier server process as exited, and continue their epochs. Raises `django.db.Error`."""
        rows = Worker.objects.filter(state__in=Worker.LIVE)
        rows.update(state=Worker.State.EXITED, reason="the server stopped", ended_at=timezone.now())
        self._continue_epochs()

    def _continue_epochs(self) -> None:
        latest = Worker.objects.order_by().values_list("deployment__name", "index").annotate(Max("epoch"))
        for deployment, index, epoch in latest:
            self._epochs[deployment, index] = max(epoch, self._epochs.get((deployment, index), 0))

    def next_epoch(self, deployment: str, index: int) -> int:
        """An epoch greater than all earlier ones of deployments of this name and of the index, written or not."""
        epoch = self._epochs.get((deployment, index), 0) + 1
        self._epochs[deployment, index] = epoch
        return epoch

    def claim(self, worker: Worker) -> None:
        """Write the row of a worker before it is launched, if other reconcilers may look for it. Raises `django.db.Error`, or
        LeadershipLost if this process may launch no more.
        """
        if self.leadership is None:
            return
        with transaction.atomic():
            self.leadership.fence()
            worker.save()

    def note_model(self, deployment_id: int, model: ModelInfo | None) -> None:
        """Queue what a ready worker says of its model."""
        if model is not None:
            with self._lock:
                self._models[deployment_id] = msgspec.msgpack.encode(model)

    def note_decision(self, deployment: str, facts: dict[str, object]) -> None:
        """Queue a scaling decision for the audit log."""
        with self._lock:
            self._decisions.append((deployment, facts))

    def note(self, worker: Worker, *fields: str) -> None:
        """Queue these fields of a worker to be written; a worker without a row gets one."""
        with self._lock:
            _merge(self._unwritten, worker, set(fields))

    def read(self) -> Registries:
        """Read the registries from the database and cache them. Raises `django.db.Error`."""
        with self._reading:  # one reader at a time, so that an older result never replaces a newer one
            self.registries = read_registries()
            return self.registries

    def read_changes(self) -> None:
        """Read them if anything was written since the last call. For the thread that follows. Raises `django.db.Error`."""
        version = changes.version()  # first: what is written meanwhile is read the next time
        if version != self._version:
            self.read()
            self._version = version

    def write(self) -> None:
        """Write queued fields and observed states. Raises `django.db.Error` or LeadershipLost; what was not written stays
        queued.
        """
        with self._lock:
            unwritten, self._unwritten = self._unwritten, {}
        try:
            for place, (worker, fields) in list(unwritten.items()):
                with self._fenced():
                    _write_worker(worker, fields)
                    changes.announce()
                del unwritten[place]
        finally:
            with self._lock:
                for worker, fields in self._unwritten.values():
                    _merge(unwritten, worker, fields)
                self._unwritten = unwritten
        for row in self.registries.deployments if self.registries else ():
            self._write_deployment(row)
        self._write_decisions()

    def _write_deployment(self, row: Deployment) -> None:
        seen, model = self.observed.get(row.pk), self._models.get(row.pk)
        fields: dict[str, Any] = {}
        if seen is not None and seen.generation == row.generation and seen.differs_from(row):
            fields |= asdict(seen) | {"cost_updated_at": timezone.now()}
            fields["observed_generation"] = fields.pop("generation")
            if seen.state == str(Deployment.State.DELETED):
                fields["ended_at"] = timezone.now()
        if model is not None and model != (None if row.model_info is None else bytes(row.model_info)):
            fields["model_info"] = model
        if fields:
            with self._fenced():
                Deployment.objects.filter(pk=row.pk).update(**fields)
                changes.announce()

    def _write_decisions(self) -> None:
        with self._lock:
            decisions, self._decisions = self._decisions, []
        for position, (deployment, facts) in enumerate(decisions):
            try:
                with self._fenced():
                    audit.record("autoscaler", f"deployment.scaling.{facts['rule']}", deployment, **facts)
            except Error:
                with self._lock:
                    self._decisions = decisions[position:] + self._decisions
                raise

    @contextmanager
    def _fenced(self) -> Iterator[None]:
        """A transaction in which this process still leads."""
        with transaction.atomic():
            lease = self.leadership or self.standing
            if lease is not None:
                lease.fence()
            yield

    def campaign(self) -> None:
        """Acquire or renew the leadership if that is due. What a new leader finds is read before it acts."""
        if self.standing is not None and self.standing.epoch and self.standing.due:
            self.standing.campaign()
            if self.displaced:
                logger.error(
                    "another reconciler has taken over while this process was suspended; it changes nothing any more"
                )
        leadership = self.leadership
        if leadership is None:
            return
        if leadership.due:
            if not leadership.epoch:
                leadership.bury()
            leadership.campaign()
        epoch = leadership.epoch
        if epoch and (self.found is None or self.found.epoch != epoch):
            with self._lock:
                self._unwritten, self._decisions = {}, []
            self.observed.clear()
            self._continue_epochs()
            rows = Worker.objects.filter(state__in=Worker.LIVE).select_related("deployment__version__model", "version")
            self.found = Found(epoch, tuple(rows.order_by("started_at", "pk")))

    def note_node(self) -> None:
        """Record this machine and its capacity. Raises `django.db.Error`."""
        fields = {
            "cpus": usable_cpus(),
            "memory_bytes": psutil.virtual_memory().total,
            "seen_at": timezone.now(),
        }
        Node.objects.update_or_create(name=os.uname().nodename, defaults=fields)

    def keep_house(self) -> None:
        """Record this machine; remove the records of deployments that were deleted a day ago, of workers that ended a week ago,
        of web processes that are gone, the files of removed adapters, and the KV blocks of deleted deployments.
        """
        if time.monotonic() - self._kept_at < HOUSEKEEPING_S:
            return
        self._kept_at = time.monotonic()
        with self._fenced():
            self.note_node()
            Deployment.objects.filter(
                state=Deployment.State.DELETED, ended_at__lt=timezone.now() - KEEP_DELETED
            ).delete()
            later = Worker.objects.filter(
                deployment=OuterRef("deployment"), index=OuterRef("index"), epoch__gt=OuterRef("epoch")
            )
            Worker.objects.filter(Exists(later), ended_at__lt=timezone.now() - KEEP_ENDED).delete()
            WebProcess.objects.filter(seen_at__lt=Now() - SILENT_FOR).delete()
            digests = set(AdapterVersion.objects.values_list("digest", flat=True))
            kept = set(Deployment.objects.exclude(state=Deployment.State.DELETED).values_list("pk", flat=True))
        sweep_store(digests)
        sweep_offload_folders(kept)

    def follow(self, stop: threading.Event, publish: Callable[[], None]) -> None:
        """Read, publish and write in a loop until `stop` is set; retries with pauses while the database is unreachable."""
        pause = INTERVAL_S
        while not stop.wait(pause):
            done = self._attempt(self.campaign) and self._attempt(self.read_changes)
            if done and self.loads is not None:
                done = self._attempt(self.loads.read)
            if done and (self.leadership is None or self.leadership.leads):
                done = self._attempt(publish) and self._attempt(self.write) and self._attempt(self.keep_house)
            pause = INTERVAL_S if done else min(pause * 2, LONGEST_PAUSE_S)
            if done != self.reachable:
                self.reachable = done
                logger.warning("registry reachable again" if done else "registry unreachable; workers keep running")

    def _attempt(self, step: Callable[[], object]) -> bool:
        try:
            step()
        except Error as error:
            if self.reachable:
                logger.warning("registry unreachable", error=one_line(error))
            close_old_connections()
            return False
        except LeadershipLost as error:
            logger.warning("leadership lost", reason=str(error))
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
        logger.warning("worker row not written", worker=worker.worker_id, error=one_line(error))
    finally:
        worker.started_at = started_at
