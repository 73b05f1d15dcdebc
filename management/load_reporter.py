"""Stores this process's load reports in the database: for reconcilers in other processes, and for `status`."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import msgspec
import structlog
from django.db import Error, close_old_connections
from django.db.models.functions import Now

from management.database_errors import one_line
from management.models import WebProcess

if TYPE_CHECKING:
    from management.load import LoadSource

logger = structlog.get_logger(__name__)

INTERVAL_S = 1.0
LONGEST_PAUSE_S = 5.0


@dataclass(slots=True)
class LoadReporter:
    """Reports under the name `process`, which no other process has."""

    process: str
    load: LoadSource
    _due: threading.Event = field(default_factory=threading.Event)

    def hurry(self) -> None:
        """Report now: a request waits for a deployment to wake. Thread-safe."""
        self._due.set()

    def run(self, stop: threading.Event) -> None:
        """Report once a second, and when told to, until `stop` is set; then sign off. While the database is away, reports are dropped: the next
        one repeats the last seconds.
        """
        number, pause = 0, INTERVAL_S
        while not stop.is_set():
            self._due.wait(pause)
            self._due.clear()
            number += 1
            try:
                self._report(number)
                pause = INTERVAL_S
            except Error:  # whoever reads the registries logs that the database is away
                close_old_connections()
                pause = min(pause * 2, LONGEST_PAUSE_S)
        try:
            WebProcess.objects.filter(name=self.process).delete()
        except Error as error:
            logger.warning("web process not signed off", error=one_line(error))
        close_old_connections()

    def _report(self, number: int) -> None:
        for report in self.load.reports():
            fields = {"report_number": number, "report": msgspec.msgpack.encode(report), "seen_at": Now()}
            WebProcess.objects.update_or_create(name=self.process, defaults=fields)
