"""Watches a server of this machine: memory, descriptors and threads of its processes, and its own gauges; kills its workers."""

from __future__ import annotations

import contextlib
import re
import signal
import statistics
import time
import urllib.error
import urllib.request
from itertools import combinations

import msgspec
import psutil

GAUGES = (
    "vllm:num_requests_running", "vllm:num_requests_waiting", "dragoman_held_requests", "tgi_queue_size",
    "tgi_batch_current_size",
)  # fmt: skip
KV_USAGE = "vllm:kv_cache_usage_perc"
TASKS = "dragoman_event_loop_tasks"
MIN_SAMPLES = 8


class Observation(msgspec.Struct):
    """A server at one moment. Its own figures are None where `/metrics` did not answer, as while a worker starts."""

    at_s: float
    rss_mib: dict[int, float]
    """By process, the workers too."""
    descriptors: int
    threads: int
    tasks: float | None = None
    kv_usage: float | None = None
    gauges: float | None = None


def observe(pid: int, front: str, key: str) -> Observation:
    """Look at the server with this process id; `key` is an API key, or empty. Raises psutil.NoSuchProcess if it has ended."""
    server = psutil.Process(pid)
    rss = {pid: server.memory_info().rss / 2**20}
    for worker in workers(pid):
        with contextlib.suppress(psutil.NoSuchProcess):
            rss[worker.pid] = worker.memory_info().rss / 2**20
    seen = Observation(time.time(), rss, server.num_fds(), server.num_threads())
    with contextlib.suppress(urllib.error.URLError, ConnectionError, TimeoutError):
        # A connection of its own, which is closed again, is not among the descriptors that were counted.
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        with urllib.request.urlopen(urllib.request.Request(f"{front}/metrics", headers=headers), timeout=5) as page:
            text = page.read().decode()
        seen.tasks, seen.kv_usage = total(text, TASKS), total(text, KV_USAGE)
        seen.gauges = sum(total(text, name) or 0.0 for name in GAUGES)
    return seen


def total(text: str, name: str) -> float | None:
    """The sum of a metric's series; None if there are none."""
    values = re.findall(rf"^{re.escape(name)}(?:{{.*}})? (\S+)$", text, re.M)
    return sum(map(float, values)) if values else None


def workers(pid: int) -> list[psutil.Process]:
    """The engine workers of a server."""
    found = []
    for child in psutil.Process(pid).children():
        with contextlib.suppress(psutil.NoSuchProcess):
            if "engine" in child.cmdline():
                found.append(child)
    return found


def kill_worker(pid: int) -> bool:
    """End the oldest worker without a chance to clean up; whether there was one."""
    for worker in sorted(workers(pid), key=lambda each: each.create_time()):
        worker.send_signal(signal.SIGKILL)
        return True
    return False


def slope_mib_per_min(seen: list[Observation], pid: int) -> float | None:
    """Theil-Sen: the median of all pairs' slopes, of at most 200 observations. None for a process that came later."""
    points = [(o.at_s / 60, o.rss_mib[pid]) for o in seen if pid in o.rss_mib]
    if len(points) < max(MIN_SAMPLES, len(seen)):
        return None
    pairs = combinations(points[:: max(1, len(points) // 200)], 2)
    return statistics.median((y2 - y1) / (x2 - x1) for (x1, y1), (x2, y2) in pairs if x2 > x1)
