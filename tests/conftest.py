"""Fixtures that all tests share: models made on the spot, and the demo model that is shipped."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import httpx
import pytest
from hypothesis import settings

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
settings.register_profile("tests", deadline=None, derandomize="CI" in os.environ)
settings.load_profile("tests")

ROOT = Path(__file__).resolve().parent.parent
DEMO = ROOT / "models" / "demo"


@pytest.fixture(scope="session")
def models_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where this worker's random models go."""
    return tmp_path_factory.mktemp("models")


@pytest.fixture(scope="session")
def live_server(tmp_path_factory: pytest.TempPathFactory):
    """One running server with the demo model for all tests of this process that do not break it."""
    from tests.live import LiveServer

    live = LiveServer(tmp_path_factory.mktemp("server") / "var").start()
    yield live
    assert live.stop() == 0, live.log


@pytest.fixture(scope="session")
def server(live_server):
    """Where a folder of tests sends its requests; tests of dialects choose (`tests/dialects/conftest.py`)."""
    return live_server
