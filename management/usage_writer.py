"""Writes what this process counted to the database, every ten seconds and at its end."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from datetime import UTC, date, datetime
from typing import TYPE_CHECKING

import structlog
from django.db import Error, close_old_connections

from management import usage_store
from management.database_errors import one_line

if TYPE_CHECKING:
    from management.usage import UsageSource

logger = structlog.get_logger(__name__)

INTERVAL_S = 10.0


@dataclass(slots=True)
class UsageWriter:
    """Writes under the name `process`, which no other process has. While the database is away, sums go on growing in
    memory.
    """

    process: str
    source: UsageSource
    kept_days: int
    _number: int = 1
    _forgot: date | None = None
    _away: bool = False

    def run(self, stop: threading.Event) -> None:
        """Write until `stop` is set, by when nothing is counted any more; then write the rest."""
        self._write()  # nothing yet, but it reads what was spent before this start
        while not stop.wait(INTERVAL_S):
            self._write()
        for _ in range(2):  # a batch that waits, and what was counted after it
            self._write()
            self.source.refresh()
        self._write()
        if self.source.batch():
            logger.warning("usage of the last seconds not stored")
        close_old_connections()

    def _write(self) -> None:
        """Store a batch if there is one; once a day, forget what is old."""
        today = datetime.now(UTC).date()
        try:
            batch = self.source.batch()
            if batch:
                usage_store.store(self.process, self._number, batch)
                self._number += 1
                self.source.stored()
            self.source.spent(today, usage_store.spent(today))
            if self._forgot != today:
                usage_store.forget(today, self.kept_days)
                self._forgot = today
            self._away = False
        except Error as error:
            if not self._away:  # one line, however long it lasts
                logger.warning("usage not stored yet", error=one_line(error))
            self._away = True
            close_old_connections()
