"""Server processes: start, wait until ready, hold while others are measured, stop with all descendants."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import time
import urllib.request
from pathlib import Path
from typing import Protocol
from urllib.parse import urlsplit

import msgspec
import psutil

from benchmarks.accounting import tree
from benchmarks.client import Address
from benchmarks.environments import tail
from benchmarks.peers.base import Launch

STOP_TIMEOUT_S = 30

FOLDERS = re.compile(r"(?<![^\s=:])/(?:[^/\s=:]+/)+")
"""The folders of a path. Records leave them out: they are one machine's."""


class StartError(Exception):
    """The server did not become ready; the text ends with its log's end."""


class Server(Protocol):
    """A server that can be asked."""

    name: str
    address: Address

    @property
    def pid(self) -> int:
        """The process whose tree the server is."""
        ...

    @property
    def command(self) -> str:
        """How it was started."""
        ...

    def ensure(self) -> bool:
        """Start it if it does not run; whether it had to be started. Raises StartError."""
        ...

    def hold(self) -> bool:
        """Keep it from using the CPU; whether that is possible."""
        ...

    def release(self) -> None:
        """Let it run again."""
        ...

    def stop(self) -> None:
        """End it."""
        ...


class OwnServer:
    """A process that is started here."""

    def __init__(self, name: str, launch: Launch, port: int, log: Path, start_timeout_s: float) -> None:
        self.name, self.address = name, Address(port, launch.model, launch.plain)
        self._launch, self._log, self._start_timeout_s = launch, log, start_timeout_s
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int:
        if self._process is None:
            raise StartError(f"{self.name} was not started")
        return self._process.pid

    @property
    def command(self) -> str:
        ours = self._launch.environment.items() - os.environ.items()
        return FOLDERS.sub(
            ".../", " ".join([*(f"{name}={value}" for name, value in sorted(ours)), *self._launch.command])
        )

    def ensure(self) -> bool:
        if self._process is not None and self._process.poll() is None:
            return False
        self.stop()
        self._log.parent.mkdir(parents=True, exist_ok=True)
        with self._log.open("a") as output:
            try:
                self._process = subprocess.Popen(
                    self._launch.command,
                    env={**os.environ, **self._launch.environment},
                    stdout=output,
                    stderr=output,
                    start_new_session=True,
                )
            except OSError as error:
                raise StartError(f"{self.name} cannot be started: {error}") from error
        deadline = time.monotonic() + self._start_timeout_s
        while time.monotonic() < deadline and self._process.poll() is None:
            if healthy(self.address.port):
                return True
            time.sleep(0.2)
        self.stop()
        raise StartError(f"{self.name} did not become ready:\n{tail(self._log)}")

    def hold(self) -> bool:
        send(tree(self.pid), signal.SIGSTOP)
        return True

    def release(self) -> None:
        send(tree(self.pid), signal.SIGCONT)

    def stop(self) -> None:
        if self._process is None:
            return
        processes = tree(self._process.pid)
        send(processes, signal.SIGCONT)
        send(processes[:1], signal.SIGTERM)  # the rest is its own to end
        _, left = psutil.wait_procs(processes, timeout=STOP_TIMEOUT_S)
        send(left, signal.SIGKILL)
        self._process.wait()
        self._process = None


class RunningServer:
    """A server that somebody else started on this machine; it is never held or stopped."""

    def __init__(self, name: str, address: Address) -> None:
        self.name, self.address = name, address
        self._pid = listening_pid(address.port)

    @property
    def pid(self) -> int:
        return self._pid

    @property
    def command(self) -> str:
        return " ".join(psutil.Process(self._pid).cmdline())

    def ensure(self) -> bool:
        if not psutil.pid_exists(self._pid):
            raise StartError(f"{self.name} has ended")
        return False

    def hold(self) -> bool:
        # It is not ours to stop. What it uses while others are measured counts as others' use.
        return False

    def release(self) -> None:
        """It was not held."""

    def stop(self) -> None:
        """Its owner's to do."""


def running_server(argument: str) -> RunningServer:
    """`name=url` or `name=url#model`; without a model it is the first of /v1/models. Raises ValueError or OSError."""
    name, _, url = argument.partition("=")
    url, _, model = url.partition("#")
    port = urlsplit(url).port
    if not name or port is None:
        raise ValueError(f"{argument} is not name=http://host:port")
    if not model:
        with urllib.request.urlopen(f"{url}/v1/models", timeout=10) as answer:
            model = msgspec.json.decode(answer.read())["data"][0]["id"]
    return RunningServer(name, Address(port, model))


def listening_pid(port: int) -> int:
    """The oldest process that listens on the port; raises ValueError."""
    found = [
        connection.pid
        for connection in psutil.net_connections("tcp")
        if connection.status == psutil.CONN_LISTEN and connection.laddr.port == port and connection.pid is not None
    ]
    if not found:
        raise ValueError(f"no process of this machine listens on port {port}")
    return int(min(found, key=lambda pid: psutil.Process(pid).create_time()))


def healthy(port: int) -> bool:
    """Whether /health answers 200."""
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5) as answer:
            return bool(answer.status == 200)
    except OSError:  # URLError is one
        return False


def send(processes: list[psutil.Process], number: signal.Signals) -> None:
    """Signal those that are still there."""
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.send_signal(number)
