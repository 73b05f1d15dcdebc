"""Workers as child processes of this one. When this process dies, however it dies, they see EOF and exit."""

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

from management.launchers.base import WorkerStatus
from management.launchers.environment import worker_environment

if TYPE_CHECKING:
    from engine.config import EngineConfig

ROOT = Path(__file__).resolve().parent.parent.parent
"""Where `python -m engine` finds the engine: beside this package, in a source tree and in a wheel."""
EXIT_PATIENCE_S = 5.0


class LocalWorker:
    """One child process; the pipes are described in `engine.__main__`."""

    def __init__(self, config: EngineConfig) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "engine"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            cwd=ROOT,
            env=worker_environment(os.environ),
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
        except OSError:  # it ended at once, and nobody else would know of it
            self.kill()
            stdout.close()
            with suppress(OSError):  # what it was not told is told to nobody
                stdin.close()
            raise

    def statuses(self) -> list[WorkerStatus]:
        """The lines that are complete by now."""
        data = self._status.read()
        if not data:
            return []
        *lines, self._unread = (self._unread + data).split(b"\n")
        return [msgspec.json.decode(line, type=WorkerStatus) for line in lines]

    def exit_code(self) -> int | None:
        """As Popen.poll."""
        return self._process.poll()

    def drain(self) -> None:
        """SIGTERM."""
        self._process.terminate()

    def kill(self) -> None:
        """SIGKILL, and no zombie."""
        self._process.kill()
        self._process.wait()

    def close(self) -> None:
        """Let go of the lifeline, and of patience after a while."""
        self._lifeline.close()
        try:
            self._process.wait(EXIT_PATIENCE_S)
        except subprocess.TimeoutExpired:
            self.kill()
        self._status.close()


class LocalLauncher:
    """Child processes with sockets in a private folder."""

    def __init__(self) -> None:
        # The path of a Unix socket has at most 107 bytes, so it cannot lie in any data folder.
        self._directory = Path(tempfile.mkdtemp(prefix="dragoman-"))
        self._workers: list[LocalWorker] = []

    def launch(self, config: EngineConfig) -> LocalWorker:
        """Start a child."""
        self._workers = [worker for worker in self._workers if worker.exit_code() is None]
        self._workers.append(LocalWorker(config))
        return self._workers[-1]

    def address(self, name: str) -> str:
        """In the private folder."""
        return f"unix:{self._directory / name}.sock"

    def close(self) -> None:
        """End all children and remove the folder."""
        for worker in self._workers:
            worker.close()
        shutil.rmtree(self._directory)
