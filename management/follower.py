"""Follows the registries in a web process without a reconciler: and publishes snapshots.

The request path never waits for this. While the database is away, the last snapshot stays.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import structlog
from django.db import Error, close_old_connections

from management.changes import Changes
from management.database_errors import one_line
from management.ledger import Observed
from management.models import Deployment
from management.services.snapshots import build_snapshot, read_ready_workers, read_registries

if TYPE_CHECKING:
    from management.snapshot import Snapshot, SnapshotHolder

logger = structlog.get_logger(__name__)

POLL_S = 0.5
LONGEST_PAUSE_S = 2.0


@dataclass(slots=True)
class RegistryFollower:
    """Reads what the control plane decides elsewhere."""

    holder: SnapshotHolder
    _reading: threading.Lock = field(default_factory=threading.Lock)
    reachable: bool = True
    """Whether the database could be used when it was last tried."""

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
        """Follow the registries until `stop` is set."""
        changes = Changes()
        pause = POLL_S
        while not stop.is_set():
            try:
                self.refresh()
                changes.wait(POLL_S, stop)
                self._note_reachable(True)
                pause = POLL_S
            except Error as error:
                self._note_reachable(False, one_line(error))
                changes.close()
                close_old_connections()
                stop.wait(pause)
                pause = min(pause * 2, LONGEST_PAUSE_S)
            except Exception:  # the loop must survive any error of one pass
                logger.exception("following the registries failed")
                stop.wait(LONGEST_PAUSE_S)
        changes.close()

    def _note_reachable(self, reachable: bool, error: str = "") -> None:
        if reachable != self.reachable:
            self.reachable = reachable
            logger.warning("registry reachable again" if reachable else "registry unreachable", error=error)
