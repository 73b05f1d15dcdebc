"""The leased local launcher: workers are processes of this machine that outlive the launcher until their leases end.

Another process of the same user takes them over by their control sockets (`engine.process.control`), over TCP also one on another
host (`remote`). On a Unix socket a worker is known by its socket's peer, never by a number that another process may have meanwhile:
signals go through a pidfd.
"""

from __future__ import annotations

import os
import select
import signal
import socket
import struct
import subprocess
from contextlib import suppress
from typing import TYPE_CHECKING

import msgspec

from engine.address import Channel, UnixAddress, parse
from engine.failures import ExitStatus
from engine.process.control import Renew
from engine.process.cpus import usable_cpus
from management.launchers.base import WorkerStatus
from management.launchers.cpus import threads_of
from management.launchers.environment import worker_environment
from management.launchers.local import COMMAND, ROOT
from management.launchers.place import ANYWHERE, Place
from management.launchers.remote import RemoteWorker

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from engine.config import EngineConfig
    from management.launchers.base import WorkerHandle
    from management.launchers.network import Network

READ_BYTES = 1 << 16
PEER = struct.Struct("3i")
"""The kernel's `ucred`: process, user and group id."""


class LeasedWorker:
    """A worker with a lease, as its launcher or the one that took it over sees it."""

    def __init__(self, address: UnixAddress, process: subprocess.Popen[bytes] | None = None) -> None:
        """`process` is set by the launcher that started it. Raises OSError if a worker to take over is not there."""
        self._address, self._process = address, process
        self._connection: socket.socket | None = None
        self._unread = b""
        self._last: WorkerStatus | None = None
        if process is None:
            connection = self._connect()
            self.process_id: int | None = PEER.unpack(
                connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, PEER.size)
            )[0]
        else:
            self.process_id = process.pid
        self._pidfd = os.pidfd_open(self.process_id or 0)

    def statuses(self) -> list[WorkerStatus]:
        """Decode the complete lines that have arrived."""
        data = b""
        try:
            connection = self._connection or self._connect()
            while part := connection.recv(READ_BYTES):
                data += part
        except BlockingIOError:
            pass
        except OSError:  # it has not bound its socket yet, or has ended
            self._disconnect()
        *lines, self._unread = (self._unread + data).split(b"\n")
        found = [msgspec.json.decode(line, type=WorkerStatus) for line in lines]
        if found:
            self._last = found[-1]
        return found

    def exit_code(self) -> int | None:
        """The exit status. That of a worker taken over is known only by its last report; without one it was killed."""
        if self._process is not None:
            return self._process.poll()
        poll = select.poll()
        poll.register(self._pidfd, select.POLLIN)
        if not poll.poll(0):
            return None
        state = "" if self._last is None else self._last.state
        if state == "failed":
            return ExitStatus.MODEL_REFUSED
        return ExitStatus.STOPPED if state == "exited" else -signal.SIGKILL

    def renew(self, epoch: int) -> None:
        """Send a renewal. A worker that does not read has a full socket, and will be found hung."""
        line = msgspec.json.encode(Renew(epoch)) + b"\n"
        try:
            (self._connection or self._connect()).send(line)
        except BlockingIOError:
            pass
        except OSError:
            self._disconnect()

    def drain(self) -> None:
        """Send SIGTERM."""
        self._signal(signal.SIGTERM)

    def hand_over(self) -> None:
        """Send SIGTERM again."""
        self._signal(signal.SIGTERM)

    def kill(self) -> None:
        """Send SIGKILL and wait for the end."""
        self._signal(signal.SIGKILL)
        if self._process is not None:
            self._process.wait()
        else:
            poll = select.poll()
            poll.register(self._pidfd, select.POLLIN)
            poll.poll()

    def release(self) -> None:
        """Disconnect; a running worker is left to its lease. What an ended one left behind is removed."""
        if self.exit_code() is not None:
            for purpose in Channel:
                self._address.release(purpose)
        self._disconnect()
        os.close(self._pidfd)

    def _signal(self, number: signal.Signals) -> None:
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._pidfd, number)

    def _connect(self) -> socket.socket:
        connection = socket.socket(socket.AF_UNIX)
        try:
            connection.connect(self._address.path_of(Channel.CONTROL))
        except OSError:
            connection.close()
            raise
        connection.setblocking(False)
        self._connection, self._unread = connection, b""
        return connection

    def _disconnect(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None


class LeasedLauncher:
    """Launches processes with leases, and takes over those of an earlier launcher."""

    starts_here = True

    def __init__(self, directory: Path, network: Network) -> None:
        """`directory` holds the sockets; it must be the same for all launchers of one registry on this host."""
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._directory, self._network = directory, network

    def launch(
        self, config: EngineConfig, secrets: Mapping[str, str] | None = None, place: Place = ANYWHERE
    ) -> WorkerHandle:
        """Start a process in a session of its own; raises OSError."""
        process = subprocess.Popen(
            COMMAND,
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            cwd=ROOT,
            env=worker_environment(os.environ) | dict(secrets or {}),
            start_new_session=True,
        )
        if process.stdin is None:
            raise RuntimeError("the worker's pipe was not made")
        with suppress(OSError), process.stdin as stdin:  # if it ended at once, its exit status will say so
            stdin.write(msgspec.json.encode(self._network.completed(config)) + b"\n")
        return self._handle(config.address, process)

    def adopt(self, address: str, name: str) -> WorkerHandle | None:
        """Connect to the worker's control channel."""
        try:
            return self._handle(address)
        except OSError:
            return None

    def address(self, name: str) -> str:
        """A Unix socket in the directory, or a port."""
        return self._network.address() or f"unix:{self._directory / name}.sock"

    def threads(self, workers: int) -> int:
        """Its share of this machine's CPUs."""
        return threads_of(workers, usable_cpus())

    def close(self) -> None:
        """Nothing: the workers run on until their leases end, or another launcher takes them over."""

    def _handle(self, address: str, process: subprocess.Popen[bytes] | None = None) -> WorkerHandle:
        place = parse(address)
        if isinstance(place, UnixAddress):
            return LeasedWorker(place, process)
        return RemoteWorker(place, self._network.credentials, process)
