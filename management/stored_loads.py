"""The load reports of web processes, as they are stored in the database for the reconciler."""

from __future__ import annotations

import msgspec

from management.load import LoadReport
from management.models import WebProcess


class StoredLoads:
    """The load reports of all web processes, as they are stored; the reconciler's source."""

    def __init__(self) -> None:
        self._numbers: dict[str, int] = {}
        self._reports: dict[str, LoadReport] = {}

    def read(self) -> None:
        """Read new reports. Raises `django.db.Error`."""
        numbers = dict(WebProcess.objects.values_list("name", "report_number"))
        changed = [name for name, number in numbers.items() if self._numbers.get(name) != number]
        reports = {name: report for name, report in self._reports.items() if name in numbers}
        for name, data in WebProcess.objects.filter(name__in=changed).values_list("name", "report"):
            reports[name] = msgspec.msgpack.decode(bytes(data), type=LoadReport)
        self._numbers, self._reports = numbers, reports

    def reports(self) -> tuple[LoadReport, ...]:
        """The last report of every web process."""
        return tuple(self._reports.values())
