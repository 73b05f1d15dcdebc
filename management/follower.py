"""Follows the registries in a web process without a reconciler: publishes snapshots, and reports the process's load.

The request path never waits for this. While the database is away, the last snapshot stays.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import msgspec
import structlog
from django.db import Error, close_old_connections
from django.db.models.functions import Now

from management.changes import Changes
from management.ledger import Observed
from management.models import Deployment, WebProcess
from management.services.snapshots import build_snapshot, read_ready_workers, read_registries

if TYPE_CHECKING:
    from management.load import LoadSource
    from management.snapshot import Snapshot, SnapshotHolder

logger = structlog.get_logger(__name__)

POLL_S = 0.5
REPORT_EVERY_S = 1.0
LONGEST_PAUSE_S = 2.0


@dataclass(slots=True)
class RegistryFollower:
    """The control plane's part in a web process."""

    holder: SnapshotHolder
    process: str
    """A name that no other process has."""
    load: LoadSource | None = None
    _reading: threading.Lock = field(default_factory=threading.Lock)
    _reachable: bool = True

    def refresh(self) -> None:
        """Read the registries and publish a snapshot. Thread-safe; raises `django.db.Error`."""
        with self._reading:  # one reader at a time, so that an older result never replaces a newer one
            registries, ready = read_registries(), read_ready_workers()

            def build() -> Snapshot:
                return build_snapshot(registries, ready)

            self.holder.refresh(build)

    def observed(self, row: Deployment) -> Observed:
        """A deployment's observed state: what the reconciler has written."""
        return Observed.of(row)

    def failure(self) -> tuple[str, str] | None:
        """Name and reason of a deployment that should run and has failed, or None. Raises `django.db.Error`."""
        rows = Deployment.objects.filter(state=Deployment.State.FAILED, replicas__gt=0, deleted=False)
        row = rows.order_by("pk").first()
        return None if row is None else (row.name, row.reason)

    def run(self, stop: threading.Event) -> None:
        """Follow the registries until `stop` is set, then sign off."""
        reporter = threading.Thread(target=self._report_until, args=(stop,), name="load")
        reporter.start()
        changes = Changes()
        pause = POLL_S
        while not stop.is_set():
            try:
                self.refresh()
                changes.wait(POLL_S, stop)
                self._note_reachable(True)
                pause = POLL_S
            except Error as error:
                self._note_reachable(False, str(error))
                changes.close()
                close_old_connections()
                stop.wait(pause)
                pause = min(pause * 2, LONGEST_PAUSE_S)
            except Exception:  # the loop must survive any error of one pass
                logger.exception("following the registries failed")
                stop.wait(LONGEST_PAUSE_S)
        changes.close()
        reporter.join()

    def _report_until(self, stop: threading.Event) -> None:
        number = 0
        while not stop.wait(REPORT_EVERY_S):
            number += 1
            try:
                self._report(number)
            except Error:  # the follower's thread says that the database is away
                close_old_connections()
        try:
            WebProcess.objects.filter(name=self.process).delete()
        except Error as error:
            logger.warning("web process not signed off", error=str(error))
        close_old_connections()

    def _report(self, number: int) -> None:
        for report in self.load.reports() if self.load is not None else ():
            WebProcess.objects.update_or_create(
                name=self.process,
                defaults={"report_number": number, "report": msgspec.msgpack.encode(report), "seen_at": Now()},
            )

    def _note_reachable(self, reachable: bool, error: str = "") -> None:
        if reachable != self._reachable:
            self._reachable = reachable
            logger.warning("registry reachable again" if reachable else "registry unreachable", error=error)
