"""What a soak looks at: memory over time, metrics, and workers that it can kill."""

from __future__ import annotations

import subprocess
import sys

import pytest

from loadtests.measured import Measured
from loadtests.plan import PROFILES
from loadtests.residue import Observation, kill_worker, slope_mib_per_min, total, workers
from loadtests.shapes import SHAPES
from tests.loadtests.runs import T0, sample, window
from tests.waiting import wait_until


def seen(at_s, rss, descriptors=20, **facts):
    given = {"threads": 5, "tasks": 3.0, "kv_usage": 0.0, "gauges": 0.0, **facts}
    return Observation(T0 + at_s, rss, descriptors, **given)


def test_a_slope_is_not_moved_by_a_spike():
    flat = [seen(i, {1: 100.0 + 50 * (i == 7)}) for i in range(60)]
    assert slope_mib_per_min(flat, 1) == 0
    growing = [seen(i, {1: 100 + i / 30 + 50 * (i == 7)}) for i in range(60)]
    assert slope_mib_per_min(growing, 1) == pytest.approx(2)


def test_a_process_that_came_later_has_no_slope():
    observed = [seen(i, {1: 100.0} if i < 10 else {1: 100.0, 2: 1.0 * i}) for i in range(60)]
    assert slope_mib_per_min(observed, 2) is None
    assert slope_mib_per_min(observed[:3], 1) is None, "too few"


def soaked(after, growth=0.0):
    plan = SHAPES["soak"].plan(PROFILES["cpu-small"])
    windows = [window("idle-before", 0, 5), window("soak", 5, 65), window("idle-after", 65, 75)]
    observations = [
        *[seen(i, {1: 100.0}) for i in range(5)],
        *[seen(i, {1: 100 + growth * i / 60, 2: 50.0}) for i in range(5, 65)],
        *[seen(i, {1: 100.0}, **after) for i in range(65, 75)],
    ]
    return SHAPES["soak"].measure(Measured(plan, [sample(6)], windows, observations))


def test_a_soak_that_leaves_nothing():
    figures = soaked({})
    assert figures == dict.fromkeys(figures, 0.0)


def test_what_is_left_is_counted():
    after = {"descriptors": 23, "threads": 6, "tasks": 4.0, "kv_usage": 0.25, "gauges": 2.0}
    figures = soaked(after, growth=3)
    assert figures["rss_slope_mib_per_min"] == pytest.approx(3)
    assert (figures["descriptors_left"], figures["threads_left"], figures["tasks_left"]) == (3, 1, 1)
    assert (figures["kv_usage_left"], figures["gauges_left"]) == (0.25, 2)


def test_a_server_whose_metrics_cannot_be_read_has_no_figures():
    figures = soaked({"kv_usage": None, "gauges": None, "tasks": None})
    assert figures["gauges_left"] is None


def test_metrics_are_summed():
    text = 'a{x="1"} 2\na{x="2"} 3.5\nab 9\n# HELP a a\n'
    assert total(text, "a") == 5.5
    assert total(text, "ab") == 9
    assert total(text, "c") is None


def test_the_oldest_worker_is_killed():
    """A server with two children, of which one is called as workers are."""
    child = "[sys.executable, '-c', 'import sys; sys.stdin.read()', kind]"
    start = f"[subprocess.Popen({child}, stdin=subprocess.PIPE) for kind in ('engine', 'other')]"
    program = f"import sys, subprocess; children = {start}; sys.stdin.read()"
    with subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE) as server:
        wait_until(lambda: workers(server.pid))
        assert kill_worker(server.pid)
        wait_until(lambda: not workers(server.pid))
        assert not kill_worker(server.pid)
        server.kill()
