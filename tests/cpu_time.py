"""A pytest plugin that says what each test costs, and fails a run of `make test` in which one costs too much.

A test's cost is CPU time: that of the test's own process and of all processes that it started and that have ended, with
the set-up and clean-up of its own fixtures. What tests share does not count: the set-up of fixtures of a wider scope,
and the clean-up behind a file's last test. Nor is a test judged that was the first of its process to import libraries,
or during which kernels were compiled, here or in another process: they are kept for the next run.

Cores differ, and one that shares its units with a busy one is slower. A cost over the limit is judged in seconds of a
core of known speed, and where that is only an estimate, it must be twice the limit to fail the run.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Generator
from pathlib import Path

import pytest

LIMIT_S = 5.0
YARDSTICK_S = 0.115
"""What `yardstick_s` is on the core whose seconds count, one of 2023 that has nothing else to do."""
MUCH = 3
"""With a load average over as many processes for each core, others slow this run in ways that no yardstick shows."""
ALIKE = 1.15
"""Up to this ratio of its yardstick to that, a core counts as one of known speed."""
MODULES = 100
"""As many new modules in a test are libraries that it was the first to import."""
SHOWN = 30
EXPENSIVE = {
    "tests/clients/test_gateways.py::test_litellm": "importing litellm alone takes three to four seconds",
    "tests/gpu/test_compiles.py::test_kernels_compile_and_fit": "every kernel, for three architectures",
}
"""Tests of `make test` that may cost more, each with the reason."""
_BEGAN, _SHARED, _KERNELS = pytest.StashKey[float](), pytest.StashKey[float](), pytest.StashKey[float]()
_MODULES = pytest.StashKey[int]()
KERNELS = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "dragoman"


def cpu_s() -> float:
    """CPU seconds of this process and of its children that have ended."""
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


def yardstick_s() -> float:
    """CPU seconds that this core takes now for a fixed number of Python's steps."""
    began, total = time.process_time(), 0
    for number in range(3_000_000):
        total += number % 7
    return time.process_time() - began


def last_compiled() -> float:
    """When a compiled kernel was last kept."""
    return max((folder.stat().st_mtime for folder in KERNELS.glob("kernels-*/*")), default=0.0)


def pytest_addoption(parser: pytest.Parser) -> None:
    """`--limit-cpu-time`, which `make test` gives."""
    parser.addoption(
        "--limit-cpu-time", action="store_true", help=f"fail when a test costs over {LIMIT_S:.0f} s of CPU"
    )


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> Generator[None]:
    """Look at the clock."""
    item.stash[_KERNELS], item.stash[_SHARED], item.stash[_MODULES] = last_compiled(), 0.0, len(sys.modules)
    item.stash[_BEGAN] = cpu_s()
    return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_fixture_setup(fixturedef: pytest.FixtureDef[object], request: pytest.FixtureRequest) -> Generator[None]:
    """Leave out what a fixture of a wider scope costs, with the fixtures that it asks for."""
    if fixturedef.scope == "function":
        return (yield)
    item = request._pyfuncitem
    began, before = cpu_s(), item.stash[_SHARED]
    try:
        return (yield)
    finally:
        item.stash[_SHARED] = before + cpu_s() - began


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> Generator[None]:
    """The report of the clean-up carries the cost, to the process that sums up."""
    before = cpu_s()
    try:
        return (yield)
    finally:
        end = cpu_s() if nextitem is not None and nextitem.path == item.path else before
        cost = judged = end - item.stash[_BEGAN] - item.stash[_SHARED]
        if cost > LIMIT_S:
            judged = on_known_core(cost, yardstick_s(), os.getloadavg()[0] > MUCH * (os.cpu_count() or 1))
        reason = "compiled kernels" if last_compiled() > item.stash[_KERNELS] else ""
        if not reason and len(sys.modules) > item.stash[_MODULES] + MODULES:
            reason = "imported libraries"
        item.user_properties += [("cpu_s", cost), ("judged_s", judged), ("excused", reason)]


def on_known_core(cost_s: float, core_yardstick_s: float, crowded: bool = False) -> float:
    """What is judged, in seconds, of a cost on a core whose `yardstick_s` is this, of a machine with too much to do if
    `crowded`.
    """
    slower = core_yardstick_s / YARDSTICK_S
    return cost_s / max(1.0, slower) / (2 if crowded or slower > ALIKE else 1)


class Costs:
    """What the tests of a run cost. Only the process that sums up has it."""

    def __init__(self, limited: bool) -> None:
        self.limited = limited
        self.by_test: dict[str, float] = {}
        self.judged: dict[str, float] = {}
        self.excused: dict[str, str] = {}

    @property
    def excessive(self) -> list[str]:
        """Tests over the limit without a reason."""
        over = [test for test, cost in self.judged.items() if cost > LIMIT_S]
        excused = {*self.excused, *(test for test in over if test.partition("[")[0] in EXPENSIVE)}
        return [test for test in over if self.limited and test not in excused]

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Note a test that is done."""
        figures = dict(report.user_properties)
        if report.when == "teardown" and "cpu_s" in figures:
            self.by_test[report.nodeid] = float(str(figures["cpu_s"]))
            self.judged[report.nodeid] = float(str(figures["judged_s"]))
            if figures["excused"]:
                self.excused[report.nodeid] = str(figures["excused"])

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """A test over the limit fails the run."""
        if self.excessive and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """The most expensive tests, and those over the limit."""
        write = terminalreporter.write_line
        dearest = sorted(self.by_test.items(), key=lambda each: -each[1])[:SHOWN]
        write(f"CPU seconds of the {len(dearest)} most expensive of {len(self.by_test)} tests:")
        for test, cost in dearest:
            write(f"{cost:8.2f} {test}{f' ({self.excused[test]})' if test in self.excused else ''}")
        for test in self.excessive:
            cost = f"{self.judged[test]:.1f} s of CPU on a core of known speed, over {LIMIT_S:.0f} s"
            write(f"{cost}, without a reason in tests/cpu_time.py: {test}", red=True)


def pytest_configure(config: pytest.Config) -> None:
    """Sum up, but not in the processes of xdist."""
    if not hasattr(config, "workerinput") and not config.option.collectonly:
        config.pluginmanager.register(Costs(config.option.limit_cpu_time))
