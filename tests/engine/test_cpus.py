"""Usable CPUs: trees of control groups as they lie on real machines, made of files."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from engine import core
from engine.config import EngineConfig
from engine.cpu.kernels import threads
from engine.process import cpus
from engine.process.cpus import FairShare, usable_cpus
from engine.process.memory import free_memory
from tests.conftest import DEMO


@pytest.fixture(autouse=True)
def _many_cpus(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(16)))


def tree(tmp_path: Path, groups: str, mounts: list[tuple[str, str, str]], files: dict[str, str]) -> Path:
    """A process's folder. `mounts`: (root, folder, "cgroup2" or the options of version 1); `files` below tmp_path."""
    lines = []
    for root, folder, kind in mounts:
        where = str(tmp_path / folder).replace(" ", "\\040")
        tail = "cgroup2 cgroup2 rw" if kind == "cgroup2" else f"cgroup cgroup {kind}"
        lines.append(f"31 23 0:28 {root} {where} rw,nosuid shared:9 - {tail}\n")
    proc = tmp_path / "proc"
    proc.mkdir()
    (proc / "cgroup").write_text(groups)
    (proc / "mountinfo").write_text("".join(lines))
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    return proc


V2 = [("/", "sys", "cgroup2")]


@pytest.mark.parametrize(
    ("groups", "files", "expected"),
    [
        ("0::/a/b\n", {"sys/a/b/cpu.max": "300000 100000\n"}, 3),
        ("0::/a/b\n", {"sys/a/b/cpu.max": "max 100000\n", "sys/a/cpu.max": "250000 100000\n"}, 2),
        ("0::/a/b\n", {"sys/a/b/cpu.max": "400000 100000\n", "sys/a/cpu.max": "800000 100000\n"}, 4),
        ("0::/a\n", {"sys/a/cpu.max": "50000 100000\n"}, 1),
        ("0::/a\n", {"sys/a/cpu.max": "max 100000\n"}, 16),
        ("0::/a\n", {"sys/a/cpu.max": "6400000 100000\n"}, 16),
        ("0::/\n", {"sys/cpu.max": "200000 100000\n"}, 2),  # in a namespace of its own
        ("0::/../other\n", {"sys/cpu.max": "200000 100000\n"}, 2),
        ("0::/a\n", {}, 16),
    ],
)
def test_version_2(tmp_path, groups, files, expected):
    assert usable_cpus(tree(tmp_path, groups, V2, files)) == expected


def v1(folder: str, quota: int, period: int = 100_000) -> dict[str, str]:
    return {f"{folder}/cpu.cfs_quota_us": f"{quota}\n", f"{folder}/cpu.cfs_period_us": f"{period}\n"}


def test_version_1(tmp_path):
    groups = "5:memory:/x\n4:cpu,cpuacct:/a/b\n1:name=systemd:/y\n0::/z\n"
    mounts = [("/", "mem", "rw,memory"), ("/", "cpu dir", "rw,cpu,cpuacct"), ("/", "set", "rw,cpuset"), *V2]
    files = v1("cpu dir/a/b", -1) | v1("cpu dir/a", 150_000, 50_000) | v1("cpu dir", -1) | v1("set/a/b", 100_000)
    assert usable_cpus(tree(tmp_path, groups, mounts, files)) == 3


def test_a_container_sees_its_own_group_as_the_root(tmp_path):
    groups, mounts = "4:cpu:/docker/abc\n", [("/docker/abc", "cpu", "rw,cpu")]
    assert usable_cpus(tree(tmp_path, groups, mounts, v1("cpu", 200_000))) == 2


def test_of_both_versions_the_least_counts(tmp_path):
    mounts = [("/", "cpu", "rw,cpu"), *V2]
    files = v1("cpu/a", 500_000) | {"sys/b/cpu.max": "400000 100000\n"}
    assert usable_cpus(tree(tmp_path, "4:cpu:/a\n0::/b\n", mounts, files)) == 4


def test_the_affinity_bounds_what_a_quota_gives(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 5})
    assert usable_cpus(tree(tmp_path, "0::/a\n", V2, {"sys/a/cpu.max": "400000 100000\n"})) == 2


def test_no_control_groups(tmp_path):
    assert usable_cpus(tmp_path) == 16


def test_an_engine_takes_so_many_threads_unless_it_is_told(monkeypatch):
    monkeypatch.setattr(core, "usable_cpus", lambda: 3)
    try:
        core.EngineCore(EngineConfig(model=str(DEMO))).close()
        assert threads.num_threads() == 3
        core.EngineCore(EngineConfig(model=str(DEMO), threads=2)).close()
        assert threads.num_threads() == 2
    finally:
        threads.set_num_threads(1)


def test_threads_that_do_not_get_their_cpus_become_one(monkeypatch):
    """Of work on 2 threads, seconds on the clock and of CPUs; a spell alone ends, and the next is longer."""
    now = [100.0]
    monkeypatch.setattr(cpus.time, "monotonic", lambda: now[0])
    share = FairShare(2)
    assert share.begin() == 2
    share.note(0.1, 0.19)
    assert share.begin() == 2
    share.note(0.1, 0.13)
    assert share.begin() == 1
    share.note(1.0, 1.0)  # one thread tells nothing about others
    now[0] += FairShare.SHORTEST_S
    assert share.begin() == 2
    share.note(0.1, 0.13)
    now[0] += FairShare.SHORTEST_S
    assert share.begin() == 1
    now[0] += FairShare.SHORTEST_S
    assert share.begin() == 2


def test_a_moment_tells_nothing():
    share = FairShare(2)
    share.begin()
    share.note(0.001, 0.0)
    assert share.begin() == 2


GIB = 1 << 30


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        (
            {
                "memory.max": str(6 * GIB),
                "memory.current": str(2 * GIB),
                "memory.stat": f"anon 9\ninactive_file {GIB}\n",
            },
            5 * GIB,
        ),
        ({"memory.max": str(GIB), "memory.current": str(2 * GIB), "memory.stat": "inactive_file 0\n"}, 0),
        ({"memory.max": "max", "memory.current": "5", "memory.stat": "inactive_file 0\n"}, 64 * GIB),
        ({"memory.max": str(90 * GIB), "memory.current": "0", "memory.stat": ""}, 64 * GIB),
        ({}, 64 * GIB),
    ],
)
def test_free_memory_is_what_the_control_groups_leave(tmp_path, monkeypatch, files, expected):
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=64 * GIB))
    outer = {"sys/memory.max": "max", "sys/memory.current": "5", "sys/memory.stat": ""}
    proc = tree(tmp_path, "0::/a\n", V2, outer | {f"sys/a/{name}": text for name, text in files.items()})
    assert free_memory(proc) == expected


def test_free_memory_of_version_1(tmp_path, monkeypatch):
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=64 * GIB))
    files = {
        "m/a/memory.limit_in_bytes": str(4 * GIB), "m/a/memory.usage_in_bytes": str(GIB),
        "m/a/memory.stat": "total_inactive_file 0\n",
    }  # fmt: skip
    assert free_memory(tree(tmp_path, "3:memory:/a\n", [("/", "m", "rw,memory")], files)) == 3 * GIB
