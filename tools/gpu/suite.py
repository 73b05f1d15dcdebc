"""The part `tests`: tests/gpu on the device. A test that passed is not run again by the next call."""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tools.gpu.results import Figure

if TYPE_CHECKING:
    from tools.gpu.part import Run

DRY = ["tests/gpu/test_sampling.py", "tests/gpu/test_products.py"]
"""Without a device `make test-all` runs all of them; these show that the part works."""
WITHOUT_DEVICE = ["tests/gpu/test_campaign.py", "tests/gpu/test_compiles.py"]
MOST_WORKERS = 8


class Recorder:
    """A pytest plugin: writes each result as it comes."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._units: dict[str, str] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """A test has passed when its clean-up has."""
        if report.failed:
            self._run.failed += 1
            lines = str(report.longrepr).splitlines()
            self._run.results.add(self._run.part, report.nodeid, [], " ".join(lines[-2:])[-500:])
            self._units.pop(report.nodeid, None)
        elif report.when == "call" or report.skipped:
            self._units[report.nodeid] = "skipped" if report.skipped else "passed"
        if report.when == "teardown" and (unit := self._units.pop(report.nodeid, "")):
            figure = Figure(row=Path(report.location[0]).name, unit=unit, value=1)
            self._run.results.add(self._run.part, report.nodeid, [figure])


def run(run: Run) -> None:
    """All of them, by several processes: each kernel is compiled for itself, by one core."""
    paths, chosen = (DRY, ["-m", "not slow and not full"]) if run.dry else (["tests/gpu"], [])
    options = ["-c", "/dev/null", "--rootdir", ".", "-p", "no:cacheprovider", "-q", "--no-header", *chosen]
    if not run.dry:
        options += [f"--ignore={path}" for path in WITHOUT_DEVICE]
        if importlib.util.find_spec("xdist") is not None:
            options += ["-n", str(min(MOST_WORKERS, len(os.sched_getaffinity(0))))]
    options += [f"--deselect={name}" for name in run.results.done(run.part)]
    status = pytest.main([*options, *paths], plugins=[Recorder(run)])
    if status not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED, pytest.ExitCode.NO_TESTS_COLLECTED):
        sys.exit(int(status))
