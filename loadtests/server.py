"""Starts a server as a child process, for runs without --host."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
START_TIMEOUT_S = 300.0


@dataclass(frozen=True)
class RunningServer:
    """A child process that serves. `ports`: of the planes beside the front plane, by the names of their settings."""

    url: str
    pid: int
    data_dir: Path
    start_s: float
    ports: dict[str, int]


@contextlib.contextmanager
def running_server(settings: dict[str, str], start_timeout_s: float = START_TIMEOUT_S) -> Iterator[str]:
    """Start a server with these settings (without the prefix DRAGOMAN_); yields the URL of its front plane and stops it."""
    with served(settings, start_timeout_s=start_timeout_s) as server:
        yield server.url


@contextlib.contextmanager
def served(
    settings: dict[str, str], planes: tuple[str, ...] = (), start_timeout_s: float = START_TIMEOUT_S
) -> Iterator[RunningServer]:
    """The same, with these other planes (such as MINDIE_PORT) on free ports, and with what else is known of it."""
    front, control = free_port(), free_port()
    ports = {name: free_port() for name in planes}
    chosen = {**{name: str(port) for name, port in ports.items()}, **settings}
    with tempfile.TemporaryDirectory(prefix="dragoman-load-") as folder:
        begin = time.monotonic()
        with Path(folder, "log").open("w") as log:
            process = subprocess.Popen(
                [sys.executable, "-W", "ignore", "manage.py", "serve"],
                cwd=ROOT,
                env=environment(front, control, Path(folder), chosen),
                stdout=log,
                stderr=log,
            )
        try:
            url = f"http://127.0.0.1:{front}"
            _wait(process, f"{url}/health", Path(folder, "log"), start_timeout_s)
            yield RunningServer(url, process.pid, Path(folder), time.monotonic() - begin, ports)
        finally:
            process.terminate()
            process.wait(90)


def environment(front: int, control: int, data: Path, settings: dict[str, str]) -> dict[str, str]:
    """The variables of a server with these two planes alone: this process's own, and settings without the prefix DRAGOMAN_."""
    return {
        **os.environ,
        "DRAGOMAN_DATA_DIR": str(data),
        "DRAGOMAN_FRONT_PORT": str(front),
        "DRAGOMAN_CONTROL_PORT": str(control),
        "DRAGOMAN_MINDIE_PORT": "0",
        "DRAGOMAN_GRPC_PORT": "0",
        "DRAGOMAN_DJL_PORT": "0",
        "DRAGOMAN_TORCHSERVE_GRPC_INFERENCE_PORT": "0",
        "DRAGOMAN_TORCHSERVE_GRPC_MANAGEMENT_PORT": "0",
        "DRAGOMAN_LOG_FORMAT": "json",
        **{f"DRAGOMAN_{name}": value for name, value in settings.items()},
    }


def _wait(process: subprocess.Popen[bytes], url: str, log: Path, timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline and process.poll() is None:
        with contextlib.suppress(urllib.error.URLError, ConnectionError), urllib.request.urlopen(url, timeout=5):
            return
        time.sleep(0.2)
    raise RuntimeError(f"the server did not become ready:\n{log.read_text()[-2000:]}")


def free_port() -> int:
    """A port that is free at the moment."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
