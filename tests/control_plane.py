"""The control plane alone, as a process on loopback with a registry of its own: Django without workers."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

import httpx

from tests import calls
from tests.conftest import ROOT
from tests.live import free_port, heed_interrupts
from tests.waiting import wait_until

START_TIMEOUT_S = 60


@dataclass
class ControlPlane:
    data_dir: Path
    environment: dict[str, str] = field(default_factory=dict)
    port: int = field(default_factory=free_port)
    process: subprocess.Popen | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def log(self) -> str:
        return (self.data_dir / "test.log").read_text()

    def manage(self, *command: str) -> str:
        """What a management command prints."""
        return subprocess.run(
            [sys.executable, "-W", "ignore", "manage.py", *command],
            cwd=ROOT, env=self._environment, check=True, capture_output=True, text=True, timeout=START_TIMEOUT_S,
        ).stdout  # fmt: skip

    def start(self) -> ControlPlane:
        self.data_dir.mkdir(exist_ok=True, parents=True)
        self.manage("migrate", "--verbosity", "0")
        daphne = ["-m", "daphne", "-b", "127.0.0.1", "-p", str(self.port), "config.asgi:application"]
        with (self.data_dir / "test.log").open("a") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-W", "ignore", *daphne],
                cwd=ROOT, env=self._environment, stdout=log, stderr=log, preexec_fn=heed_interrupts,
            )  # fmt: skip
        wait_until(self._answers, START_TIMEOUT_S, lambda: self.log)
        return self

    def stop(self) -> None:
        assert self.process is not None
        self.process.terminate()
        self.process.wait(START_TIMEOUT_S)

    def _answers(self) -> bool:
        assert self.process is not None
        assert self.process.poll() is None, self.log
        with contextlib.suppress(httpx.HTTPError):
            return calls.get(f"{self.url}/sg_inf/openapi.json").status_code == 200
        return False

    @property
    def _environment(self) -> dict[str, str]:
        return {**os.environ, "DRAGOMAN_DATA_DIR": str(self.data_dir), **self.environment}
