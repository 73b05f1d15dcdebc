"""A PostgreSQL of a test's own, which can be stopped, killed and paused."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import psycopg

from tests import requirements
from tests.live import free_port, wait_until
from tests.requirements import need

PASSWORD = "a-password-of-the-registry"


def binaries() -> Path:
    """Where initdb and pg_ctl are. Skips the test where they are not installed."""
    need("PostgreSQL")
    found = requirements.postgresql()
    assert found is not None
    return found


@dataclass
class Cluster:
    """One server process with its children on a port of its own."""

    folder: Path = field(default_factory=lambda: Path(tempfile.mkdtemp(prefix="dragoman-postgresql-")))
    port: int = field(default_factory=free_port)

    def __post_init__(self) -> None:
        self.binaries = binaries()
        self.data = self.folder / "data"
        if os.getuid() == 0:  # PostgreSQL refuses to run as root
            shutil.chown(self.folder, "postgres", "postgres")
        password = self.folder / "password"
        password.write_text(PASSWORD)
        password.chmod(0o644)
        self._run("initdb", "-D", self.data, "-U", "dragoman", "-A", "scram-sha-256", f"--pwfile={password}", "-N")
        self.start()

    @property
    def url(self) -> str:
        return f"postgresql://dragoman:{PASSWORD}@127.0.0.1:{self.port}/postgres"

    def start(self) -> None:
        # no Unix socket; what is lost in a crash of the machine is no matter here
        options = f"-p {self.port} -h 127.0.0.1 -k '' -c fsync=off"
        self._run("pg_ctl", "-D", self.data, "-w", "-l", self.folder / "log", "-o", options, "start")
        wait_until(self.answers)

    def answers(self) -> bool:
        with contextlib.suppress(psycopg.OperationalError), psycopg.connect(self.url, connect_timeout=30):
            return True
        return False

    def stop(self) -> None:
        self._run("pg_ctl", "-D", self.data, "-w", "-m", "fast", "stop")

    def kill(self) -> None:
        """As the kernel does when memory is out."""
        processes = self._processes()
        for process in processes:
            process.kill()
        psutil.wait_procs(processes, 10)
        (self.data / "postmaster.pid").unlink(missing_ok=True)

    def pause(self) -> None:
        """Connections stay, and nobody answers."""
        for process in self._processes():
            process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        for process in reversed(self._processes()):
            process.send_signal(signal.SIGCONT)

    @contextlib.contextmanager
    def database(self) -> Iterator[str]:
        """The URL of a new database, which goes at the end."""
        name = f"dragoman_{secrets.token_hex(4)}"
        with psycopg.connect(self.url, autocommit=True, connect_timeout=30) as admin:
            admin.execute(f"CREATE DATABASE {name}")
            yield f"{self.url.rpartition('/')[0]}/{name}"
            admin.execute(f"DROP DATABASE {name} WITH (FORCE)")

    def remove(self) -> None:
        with contextlib.suppress(FileNotFoundError, psutil.NoSuchProcess, ValueError):
            self.kill()
        shutil.rmtree(self.folder)

    def _processes(self) -> list[psutil.Process]:
        """The postmaster first, so that it starts no others meanwhile."""
        postmaster = psutil.Process(int((self.data / "postmaster.pid").read_text().split()[0]))
        return [postmaster, *postmaster.children(recursive=True)]

    def _run(self, name: str, *arguments: object) -> None:
        command = [str(self.binaries / name), *map(str, arguments)]
        if os.getuid() == 0:
            command = ["runuser", "-u", "postgres", "--", *command]
        # a server that pg_ctl leaves behind would keep a pipe open
        with (self.folder / "commands.log").open("a") as log:
            done = subprocess.run(command, cwd="/", stdout=log, stderr=log, timeout=60, check=False)
        assert done.returncode == 0, (self.folder / "commands.log").read_text()
