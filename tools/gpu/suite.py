"""The part `tests`: tests/gpu on the device. A test that passed is not run again by the next call."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tools.gpu.results import Figure

if TYPE_CHECKING:
    from tools.gpu.part import Run

DRY = ["tests/gpu/test_sampling.py", "tests/gpu/test_products.py"]
"""Without a device `make test` runs all of them; these show that the part works."""


class Recorder:
    """A pytest plugin: leaves out what passed before, and writes each result as it comes."""

    def __init__(self, run: Run) -> None:
        self._run = run

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Keep the tests that the file has no result of."""
        items[:] = [item for item in items if self._run.missing(item.nodeid)]

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """A test ends with its call, or with a fixture that failed or skipped it."""
        row = Path(report.location[0]).name
        if report.failed:
            self._run.failed += 1
            lines = str(report.longrepr).splitlines()
            self._run.results.add(self._run.part, report.nodeid, [], " ".join(lines[-2:])[-500:])
        elif report.when == "call" or report.skipped:
            unit = "skipped" if report.skipped else "passed"
            self._run.results.add(self._run.part, report.nodeid, [Figure(row=row, unit=unit, value=1)])


def run(run: Run) -> None:
    """All of them, in this process: it starts the device and compiles each kernel once."""
    paths, chosen = (DRY, ["-m", "not slow and not full"]) if run.dry else (["tests/gpu"], [])
    options = ["-c", "/dev/null", "--rootdir", ".", "-p", "no:cacheprovider", "-q", "--no-header", *chosen]
    status = pytest.main([*options, *paths], plugins=[Recorder(run)])
    if status not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED, pytest.ExitCode.NO_TESTS_COLLECTED):
        sys.exit(int(status))
