"""A Ray of the test's own on this machine: a head and nodes with ports, a folder and a token of their own. It touches no other Ray.

Ray's processes listen on every address of the machine; the token is what keeps others out.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from tests.conftest import ROOT
from tests.live import free_port, heed_interrupts
from tests.waiting import wait_until

START_S = 120
HERE = {"worker-host": "127.0.0.1"}
STORE_BYTES = 80_000_000
QUICK = {"RAY_health_check_initial_delay_ms": "1000", "RAY_health_check_period_ms": "500", "RAY_health_check_failure_threshold": "3"}  # fmt: skip
"""Ray finds a lost node in seconds, and not in half a minute."""


@dataclass
class RayNode:
    """`ray start --block` and its children."""

    process: subprocess.Popen
    log: Path

    def child(self, name: str) -> psutil.Process:
        return next(each for each in psutil.Process(self.process.pid).children() if each.name() == name)

    def kill(self) -> None:
        """As a machine goes: without a word, with all that runs on it."""
        for each in [*psutil.Process(self.process.pid).children(recursive=True), self.process]:
            with contextlib.suppress(psutil.NoSuchProcess):
                each.kill()
        self.process.wait()


@dataclass
class RayCluster:
    storage: Path | None = None
    """Where the head keeps its state; None: it is lost with the head."""
    host: str = "127.0.0.1"
    """The head's address."""
    port: int = field(default_factory=free_port)
    nodes: list[RayNode] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="dr-", dir="/tmp"))  # paths of sockets are short
        self.token = secrets.token_hex(32)

    @property
    def address(self) -> str:
        """What RAY_ADDRESS says."""
        return f"{self.host}:{self.port}"

    @property
    def client(self) -> dict[str, str]:
        """The environment of who attaches."""
        return {"RAY_ADDRESS": self.address, "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": self.token}

    def start_head(self, cpus: int = 0, labels: dict[str, str] | None = None) -> RayNode:
        stored = {"RAY_gcs_storage": "rocksdb", "RAY_gcs_storage_path": str(self.storage)} if self.storage else {}
        options = [
            "--head",
            f"--port={self.port}",
            f"--ray-client-server-port={free_port()}",
            "--include-dashboard=false",
        ]
        options += [f"--node-ip-address={self.host}", f"--temp-dir={self.folder}"]
        return self._start(options, cpus, 0, labels, stored)

    def add_node(
        self,
        cpus: int = 2,
        gpus: int = 0,
        labels: dict[str, str] | None = None,
        host: str = "",
        inside: Sequence[str] = (),
    ) -> RayNode:
        """A machine beside the head; or one with an address of its own, started by the command `inside`."""
        options = [f"--address={self.address}", f"--node-ip-address={host or self.host}"]
        return self._start(options, cpus, gpus, labels, {}, inside)

    def ray(self, *arguments: str) -> str:
        """A command of Ray's own; returns its output."""
        return self._run(["-m", "ray.scripts.scripts", *arguments])

    def python(self, program: str) -> str:
        """A program that may attach; returns its output."""
        return self._run(["-c", program])

    def _run(self, arguments: list[str]) -> str:
        environment = {**os.environ, **self.client}
        done = subprocess.run(
            [sys.executable, *arguments], env=environment, capture_output=True, text=True, timeout=120
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    def stop(self) -> None:
        for node in reversed(self.nodes):
            if node.process.poll() is None:
                node.process.send_signal(signal.SIGTERM)
        for node in reversed(self.nodes):
            try:
                node.process.wait(20)
            except subprocess.TimeoutExpired:
                node.kill()
        shutil.rmtree(self.folder, ignore_errors=True)

    def _start(
        self,
        options: list[str],
        cpus: int,
        gpus: int,
        labels: dict[str, str] | None,
        environment: dict[str, str],
        inside: Sequence[str] = (),
    ) -> RayNode:
        log = self.folder / f"start-{len(self.nodes)}.log"
        given = ",".join(f"{name}={value}" for name, value in (HERE | (labels or {})).items())
        command = [
            sys.executable, "-m", "ray.scripts.scripts", "start", "--block", "--disable-usage-stats", *options,
            f"--num-cpus={cpus}", f"--num-gpus={gpus}", f"--labels={given}", f"--object-store-memory={STORE_BYTES}",
            "--min-worker-port=0", "--max-worker-port=0",
        ]  # fmt: skip
        environment = {**os.environ, **QUICK, **self.client, **environment}
        del environment["RAY_ADDRESS"]
        with log.open("w") as file:
            process = subprocess.Popen(
                [*inside, *command],
                cwd=ROOT,
                env=environment,
                stdout=file,
                stderr=file,
                preexec_fn=heed_interrupts,
                start_new_session=True,
            )
        node = RayNode(process, log)
        self.nodes.append(node)
        wait_until(lambda: "Ray runtime started" in log.read_text(), START_S, log.read_text, every_s=0.2)
        return node
