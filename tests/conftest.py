"""What all tests share: the environment that they run in, which of them `make test` runs, and a few fixtures."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import httpx
import pytest
from hypothesis import settings

from tests.requirements import missing

pytest_plugins = ["tests.cpu_time"]

DEVICE_FILES = ("/dev/nvidiactl", "/dev/kfd", "/dev/dxg")


def _has_device() -> bool:
    """Whether torch finds a device; it is asked only where there may be one, since the unit tier never imports it."""
    if not any(map(os.path.exists, DEVICE_FILES)):
        return False
    import torch

    return torch.cuda.is_available()


if not _has_device():  # before Triton is imported by anybody: its own functions are made for one or the other
    os.environ["TRITON_INTERPRET"] = "1"

# Before Django is configured: tests never touch the working copy's own data.
os.environ.setdefault("DRAGOMAN_DATA_DIR", tempfile.mkdtemp(prefix="dragoman-tests-"))
os.environ.setdefault("HF_HUB_OFFLINE", "1")
# Two test processes on two cores: threads that meet at barriers would wait for each other.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("DRAGOMAN_THREADS", "1")

# httpx gives up after 5 s of its own, which on a busy machine says nothing.
for kind in ("connect", "read", "write", "pool"):
    setattr(httpx._config.DEFAULT_TIMEOUT_CONFIG, kind, 60.0)

# How long an example takes says more about the machine than about the code.
settings.register_profile("quick", deadline=None, derandomize="CI" in os.environ, max_examples=25)
settings.register_profile("thorough", deadline=None, derandomize="CI" in os.environ, max_examples=200)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "quick"))

ROOT = Path(__file__).resolve().parent.parent
DEMO = ROOT / "models" / "demo"
FULL = frozenset({"clients", "faults", "gpu", "launchers", "security", "server"})
"""Folders of which `make test` runs only what is marked `smoke`."""


@pytest.hookimpl(tryfirst=True)  # before `-m` chooses
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what only `make test-all` runs."""
    for item in items:
        folder = item.path.relative_to(ROOT / "tests").parts[0]
        if folder in FULL and item.get_closest_marker("smoke") is None:
            item.add_marker(pytest.mark.full)


@pytest.hookimpl(optionalhook=True)  # a machine with a device may lack xdist
def pytest_xdist_auto_num_workers() -> int:
    """`-n auto` takes every CPU that this process may use; xdist itself counts cores without their second threads."""
    return len(os.sched_getaffinity(0))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Name the programs that some tests need and this machine lacks."""
    for line in missing():
        terminalreporter.write_line(f"MISSING: {line}; tests that need it cannot run", yellow=True)


@pytest.fixture(scope="session")
def models_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where this worker's random models go."""
    return tmp_path_factory.mktemp("models")


@pytest.fixture(scope="session")
def postgresql():
    """One PostgreSQL for all tests of this process that need a database of their own and leave the server alone."""
    from tests.postgresql import Cluster

    cluster = Cluster()
    yield cluster
    cluster.remove()


@pytest.fixture(scope="session")
def running_server(tmp_path_factory: pytest.TempPathFactory):
    """One running server with the demo model and every plane for all tests of this process that do not break it."""
    from tests.live import LiveServer, free_port

    live = LiveServer(
        tmp_path_factory.mktemp("server") / "var",
        environment={"DRAGOMAN_TORCHSERVE_OPEN_INFERENCE_PROTOCOL": "true"},
        rest_ports={
            plane: free_port()
            for plane in ("torchserve-inference", "torchserve-management", "torchserve-metrics", "triton-metrics")
        },
    ).start()
    yield live
    assert live.stop() == 0, live.log


@pytest.fixture(scope="session")
def server(running_server):
    """Where a folder of tests sends its requests; tests of dialects choose (`tests/dialects/conftest.py`)."""
    return running_server
