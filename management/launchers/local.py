"""The local launcher: workers are child processes. If this process dies, they read EOF on stdin and exit."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from engine.process.cpus import usable_cpus
from management.launchers.base import WorkerStatus
from management.launchers.cpus import threads_of
from management.launchers.environment import worker_environment
from management.launchers.network import THIS_HOST
from management.launchers.place import ANYWHERE, Place

if TYPE_CHECKING:
    from collections.abc import Mapping

    from engine.config import EngineConfig
    from management.launchers.network import Network

ROOT = Path(__file__).resolve().parent.parent.parent
"""Where `python -m engine` finds the engine: beside this package, in a source tree and in a wheel."""
EXIT_PATIENCE_S = 5.0
COMMAND = (sys.executable, "-m", "engine")


class LocalWorker:
    """A worker as a child process; `engine.__main__` describes its pipes."""

    def __init__(self, config: EngineConfig, secrets: Mapping[str, str] | None = None) -> None:
        self._process = subprocess.Popen(
            COMMAND,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            cwd=ROOT,
            env=worker_environment(os.environ) | dict(secrets or {}),
        )
        self.process_id: int | None = self._process.pid
        self._unread = b""
        stdin, stdout = self._process.stdin, self._process.stdout
        if stdin is None or stdout is None:
            raise RuntimeError("the worker's pipes were not made")
        self._lifeline, self._status = stdin, stdout
        os.set_blocking(stdout.fileno(), False)
        try:
            stdin.write(msgspec.json.encode(config) + b"\n")
            stdin.flush()
        except OSError:  # it ended at once; without a handle the reconciler cannot reap it
            self.kill()
            stdout.close()
            with suppress(OSError):  # flushes the rest of the configuration, which the child cannot read
                stdin.close()
            raise

    def statuses(self) -> list[WorkerStatus]:
        """Decode the complete lines on stdout. At the end of an ended worker's, close its pipes."""
        data = None if self._status.closed else self._status.read()
        if not data:
            if data is not None and self.exit_code() is not None:
                self._status.close()
                with suppress(OSError):  # what was not flushed is lost with the worker
                    self._lifeline.close()
            return []
        *lines, self._unread = (self._unread + data).split(b"\n")
        return [msgspec.json.decode(line, type=WorkerStatus) for line in lines]

    @property
    def closed(self) -> bool:
        """Whether the worker has ended and its last status was read."""
        return self._status.closed

    def exit_code(self) -> int | None:
        """The result of Popen.poll()."""
        return self._process.poll()

    def renew(self, epoch: int) -> None:
        """Nothing: the worker has this process's pipe instead of a lease."""

    def drain(self) -> None:
        """Send SIGTERM."""
        self._process.terminate()

    def hand_over(self) -> None:
        """Send SIGTERM again."""
        self._process.terminate()

    def kill(self) -> None:
        """Send SIGKILL and reap the process."""
        self._process.kill()
        self._process.wait()

    def release(self) -> None:
        """Nothing: the pipes are closed when the last status has been read."""

    def close(self) -> None:
        """Close stdin, wait EXIT_PATIENCE_S, then kill."""
        with suppress(OSError):
            self._lifeline.close()
        try:
            self._process.wait(EXIT_PATIENCE_S)
        except subprocess.TimeoutExpired:
            self.kill()
        self._status.close()


class LocalLauncher:
    """Launches workers as child processes, with sockets in a private folder or on ports."""

    starts_here = True

    def __init__(self, network: Network = THIS_HOST) -> None:
        # The path of a Unix socket has at most 107 bytes, so the folder is not below the data folder.
        self._directory = Path(tempfile.mkdtemp(prefix="dragoman-"))
        self._network = network
        self._workers: list[LocalWorker] = []

    def launch(
        self, config: EngineConfig, secrets: Mapping[str, str] | None = None, place: Place = ANYWHERE
    ) -> LocalWorker:
        """Start a child process; raises OSError."""
        self._workers = [worker for worker in self._workers if not worker.closed]
        self._workers.append(LocalWorker(self._network.completed(config), secrets))
        return self._workers[-1]

    def adopt(self, address: str, name: str) -> None:
        """None: its workers never outlive it."""

    def address(self, name: str) -> str:
        """A Unix socket in the private folder, or a port."""
        return self._network.address() or f"unix:{self._directory / name}.sock"

    def threads(self, workers: int) -> int:
        """Its share of this machine's CPUs."""
        return threads_of(workers, usable_cpus())

    def close(self) -> None:
        """End all children and remove the folder."""
        for worker in self._workers:
            worker.close()
        shutil.rmtree(self._directory)
