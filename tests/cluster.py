"""Web processes and reconcilers as separate processes on loopback, and a client that counts what it loses."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from tests import calls
from tests.conftest import DEMO, ROOT
from tests.live import free_port, heed_interrupts
from tests.waiting import wait_until

OTHER_PORTS = (
    "MINDIE_PORT", "MINDIE_MANAGEMENT_PORT", "MINDIE_METRICS_PORT", "DJL_PORT", "TORCHSERVE_GRPC_INFERENCE_PORT",
    "TORCHSERVE_GRPC_MANAGEMENT_PORT",
)  # fmt: skip
MANAGE = [sys.executable, "-W", "ignore", "manage.py"]
START_S = 120


@dataclass
class Cluster:
    data_dir: Path
    environment: dict[str, str] = field(default_factory=dict)
    front_port: int = field(default_factory=free_port)
    control_port: int = field(default_factory=free_port)
    grpc_port: int = field(default_factory=free_port)
    other_ports: dict[str, int] = field(default_factory=lambda: {name: free_port() for name in OTHER_PORTS})
    """Of dialects' own planes and services, by the setting."""
    processes: list[subprocess.Popen] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.data_dir.mkdir(parents=True, exist_ok=True)
        (self.data_dir / "run").mkdir(mode=0o700, exist_ok=True)
        # A Unix socket's path is short; pytest's folders are not.
        self.runtime = Path("/tmp") / f"dragoman-test-{os.getpid()}-{self.front_port}"
        self.runtime.mkdir(mode=0o700)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.front_port}"

    @property
    def control_url(self) -> str:
        return f"http://127.0.0.1:{self.control_port}"

    def settings(self) -> dict[str, str]:
        return {
            **os.environ,
            "DRAGOMAN_DATA_DIR": str(self.data_dir),
            "DRAGOMAN_RUNTIME_DIR": str(self.runtime),
            "DRAGOMAN_FRONT_PORT": str(self.front_port),
            "DRAGOMAN_CONTROL_PORT": str(self.control_port),
            "DRAGOMAN_GRPC_PORT": str(self.grpc_port),
            "DRAGOMAN_THREADS": "1",
            # Beside other test processes a queue may well take longer than is usual.
            "DRAGOMAN_TARGET_TTFT_MS": "0",
            **{f"DRAGOMAN_{name}": str(port) for name, port in self.other_ports.items()},
            **self.environment,
        }

    def start(self, command: str) -> subprocess.Popen:
        """Start a `web` or `reconcile` process."""
        with self.log_path.open("a") as log:
            process = subprocess.Popen(
                [*MANAGE, command],
                cwd=ROOT,
                env=self.settings(),
                stdout=log,
                stderr=log,
                preexec_fn=heed_interrupts,
            )
        self.processes.append(process)
        return process

    def start_web(self) -> subprocess.Popen:
        """Start a web process; returns when it listens beside the others."""
        process = self.start("web")
        wait_until(lambda: self._listens(process), START_S, lambda: self.log)
        return process

    def _listens(self, process: subprocess.Popen) -> bool:
        assert process.poll() is None, self.log
        return (self.runtime / f"{process.pid}.listeners").exists() and self.answers("/v1/models")

    def answers(self, path: str) -> bool:
        with contextlib.suppress(httpx.HTTPError):
            return calls.get(f"{self.url}{path}").status_code == 200
        return False

    @property
    def log_path(self) -> Path:
        return self.data_dir / "test.log"

    @property
    def log(self) -> str:
        return self.log_path.read_text()

    def run(self, *arguments: str) -> str:
        """A management command; returns its output."""
        done = subprocess.run(
            [*MANAGE, *arguments], cwd=ROOT, env=self.settings(), capture_output=True, text=True, timeout=300
        )
        assert done.returncode == 0, f"{arguments}: {done.stderr}\n{self.log[-5000:]}"
        return done.stdout

    def deploy(self, name: str = "demo", *arguments: str) -> dict[str, Any]:
        """Deploy the demo model and wait for its first worker."""
        return json.loads(self.run("deploy", str(DEMO), "--name", name, "--wait", "180", "--json", *arguments))

    def status(self) -> dict[str, Any]:
        return json.loads(self.run("status", "--json"))

    def deployment(self, name: str = "demo") -> dict[str, Any]:
        return next(row for row in self.status()["deployments"] if row["name"] == name)

    def stop(self) -> None:
        """End everything, workers included."""
        for process in self.processes:
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)
        for process in self.processes:
            process.wait(60)
        for row in self.status()["deployments"] if (self.data_dir / "dragoman.sqlite3").exists() else []:
            for worker in row["workers"]:
                with contextlib.suppress(ProcessLookupError):
                    if worker["process_id"] is not None:  # else Ray's, which ends with its node
                        os.kill(worker["process_id"], signal.SIGKILL)


class Load:
    """Threads that send short requests, one after the other, and count the answers."""

    def __init__(self, url: str, model: str = "demo", threads: int = 4, max_tokens: int = 8) -> None:
        self.counts: Counter[str] = Counter()
        self._url, self._model, self._max_tokens = url, model, max_tokens
        self._stop = threading.Event()
        self._threads = [threading.Thread(target=self._run, args=(number,)) for number in range(threads)]

    @property
    def lost(self) -> dict[str, int]:
        return {what: count for what, count in self.counts.items() if what != "ok"}

    @contextlib.contextmanager
    def running(self) -> Iterator[Load]:
        for thread in self._threads:
            thread.start()
        try:
            yield self
        finally:
            self._stop.set()
            for thread in self._threads:
                thread.join()

    def more(self, count: int) -> None:
        """Wait until so many further requests have been answered."""
        goal = self.counts["ok"] + count
        wait_until(lambda: self.counts["ok"] >= goal or bool(self.lost), 120, lambda: str(self.counts))

    def _run(self, number: int) -> None:
        body = {"model": self._model, "prompt": f"Count to {number}:", "max_tokens": self._max_tokens, "temperature": 0}
        texts = set()
        with httpx.Client(timeout=120) as kept:
            while not self._stop.is_set():
                try:
                    # Every other thread opens a connection for each request.
                    post = kept.post if number % 2 else httpx.post
                    answer = post(f"{self._url}/v1/completions", json=body, **({} if number % 2 else {"timeout": 120}))
                    if answer.status_code != 200:
                        self.counts[f"{answer.status_code} {answer.text[:200]}"] += 1
                        continue
                    texts.add(answer.json()["choices"][0]["text"])
                    self.counts["ok" if len(texts) == 1 else f"other texts: {texts}"] += 1
                except httpx.HTTPError as error:
                    self.counts[repr(error)] += 1
