"""The number of CPUs that this process may use: those of its affinity, limited by the quotas of its control groups.

Threads beyond a quota only use it up sooner; then the kernel suspends all of them for the rest of the period.
"""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING

from engine.process.control_groups import PROC, folders

if TYPE_CHECKING:
    from pathlib import Path


def usable_cpus(proc: Path = PROC) -> int:
    """The number of CPUs of this process's affinity, at most the smallest quota (in whole CPUs), and at least 1.

    `proc` is the folder of the process in /proc, of which `cgroup` and `mountinfo` are read.
    """
    affinity = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min([affinity, *(int(quota) for quota in _quotas(proc))]))


def _quotas(proc: Path) -> list[float]:
    """The quotas, in CPUs, of this process's control group and of its ancestors, for both versions of
    control groups.
    """
    read = {1: _quota_v1, 2: _quota_v2}
    found = [read[version](folder) for version, folder in folders("cpu", proc)]
    return [quota for quota in found if quota is not None]


def _quota_v2(folder: Path) -> float | None:
    """`cpu.max` is "quota period" in microseconds; the quota may be "max". The root has none."""
    try:
        quota, period = (folder / "cpu.max").read_text().split()
    except OSError:
        return None
    return None if quota == "max" else int(quota) / int(period)


def _quota_v1(folder: Path) -> float | None:
    """`cpu.cfs_quota_us` is -1 without a quota."""
    try:
        quota = int((folder / "cpu.cfs_quota_us").read_text())
        period = int((folder / "cpu.cfs_period_us").read_text())
    except OSError:
        return None
    return None if quota <= 0 or period <= 0 else quota / period


class FairShare:
    """The number of threads for work with barriers, as torch's own operations have at their ends.

    Threads spin for a short time at a barrier, so during such work each should have a CPU all the time. If they get
    clearly less CPU time, other processes use some of the CPUs, and a single thread is faster. All threads are tried
    again after a time that doubles while the CPUs stay busy.
    """

    SHARE, WINDOW_S, SHORTEST_S, LONGEST_S = 0.8, 0.05, 0.25, 8.0

    def __init__(self, threads: int) -> None:
        self._most = threads
        self._wall_s = self._cpu_s = self._alone_until_s = self._alone_s = 0.0
        self._begin_s = (0.0, 0.0)
        self._used = threads

    def begin(self) -> int:
        """Called before the work; returns the number of threads to use."""
        self._begin_s = (time.monotonic(), time.process_time())
        self._used = 1 if self._begin_s[0] < self._alone_until_s else self._most
        return self._used

    def end(self) -> None:
        """Called after the work; measures its wall-clock and CPU time."""
        self.note(time.monotonic() - self._begin_s[0], time.process_time() - self._begin_s[1])

    def note(self, wall_s: float, cpu_s: float) -> None:
        """Record work with the threads of the last `begin`: its wall-clock seconds, and its CPU seconds over all
        threads.
        """
        if self._used == 1:
            return
        self._wall_s += wall_s
        self._cpu_s += cpu_s
        if self._wall_s < self.WINDOW_S:
            return
        crowded = self._cpu_s < self.SHARE * self._used * self._wall_s
        self._wall_s = self._cpu_s = 0.0
        if crowded:
            self._alone_s = min(max(2 * self._alone_s, self.SHORTEST_S), self.LONGEST_S)
            self._alone_until_s = time.monotonic() + self._alone_s
        else:
            self._alone_s /= 2
