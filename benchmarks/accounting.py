"""Who used the CPU while a run took place: the server's processes, the client, or anybody else."""

from __future__ import annotations

import contextlib
import time
from dataclasses import dataclass

import psutil


@dataclass(frozen=True)
class Usage:
    """CPU time of a run. `other_cores` includes what the host took from a virtual machine (`steal_cores`)."""

    wall_s: float
    server_cpu_s: float
    client_cpu_s: float
    other_cores: float
    steal_cores: float
    server_memory_mib: float


class Meter:
    """Counts from its making. `server` is the process id of a server, whose descendants belong to it; None for no server."""

    def __init__(self, server: int | None) -> None:
        self._server = server
        self._busy_s, self._steal_s = machine_cpu_s()
        self._server_s = tree_cpu_s(server)
        self._client_s = time.process_time()
        self._start_s = time.perf_counter()

    def read(self) -> Usage:
        """What was used since."""
        wall_s = time.perf_counter() - self._start_s
        client_s = time.process_time() - self._client_s
        server_s = tree_cpu_s(self._server) - self._server_s
        busy_s, steal_s = machine_cpu_s()
        others_s = busy_s - self._busy_s - server_s - client_s
        return Usage(
            wall_s=wall_s,
            server_cpu_s=server_s,
            client_cpu_s=client_s,
            other_cores=max(0.0, others_s / wall_s),
            steal_cores=(steal_s - self._steal_s) / wall_s,
            server_memory_mib=tree_memory_mib(self._server),
        )


def machine_cpu_s() -> tuple[float, float]:
    """Seconds for which CPUs were not idle, and those of them that the host took (from /proc/stat)."""
    times = psutil.cpu_times()
    # Guests' time is part of user's and nice's.
    return times.user + times.nice + times.system + times.irq + times.softirq + times.steal, times.steal


def tree(pid: int) -> list[psutil.Process]:
    """A process and its descendants; empty if it has ended."""
    try:
        process = psutil.Process(pid)
        return [process, *process.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


def tree_cpu_s(pid: int | None) -> float:
    """CPU time of a process, its descendants, and those of them that have ended."""
    total = 0.0
    for process in tree(pid) if pid is not None else []:
        with contextlib.suppress(psutil.NoSuchProcess):
            times = process.cpu_times()
            total += times.user + times.system + times.children_user + times.children_system
    return total


def tree_memory_mib(pid: int | None) -> float:
    """Memory that the processes have for themselves."""
    total = 0.0
    for process in tree(pid) if pid is not None else []:
        with contextlib.suppress(psutil.NoSuchProcess):
            memory = process.memory_info()
            total += (memory.rss - memory.shared) / 2**20
    return total


def idle_cores(pid: int, seconds: float) -> float:
    """What a server uses while nobody asks it."""
    meter = Meter(pid)
    time.sleep(seconds)
    usage = meter.read()
    return usage.server_cpu_s / usage.wall_s


def wait_quiet(server: int, bound: float, limit_s: float, window_s: float = 2.0) -> None:
    """Return when others used less than `bound` cores for `window_s`, or after about `limit_s`."""
    deadline = time.monotonic() + limit_s
    while time.monotonic() < deadline:
        meter = Meter(server)
        time.sleep(window_s)
        if meter.read().other_cores <= bound:
            return
