"""A leased worker that is reached over TCP, as its launcher or the one that took it over sees it, from another host too.

Its launcher has its process. One that took it over has only its control connection: it says what it wants with every renewal, and
takes it for ended when it has said so, when nobody listens at its port any more, or when it was told to end. If it runs on behind a
network that is cut, nobody renews its lease, which ends it; its epoch is never used again.
"""

from __future__ import annotations

import signal
from typing import TYPE_CHECKING

import msgspec

from engine.failures import ExitStatus
from engine.process.control import Renew, Wanted
from management.launchers.base import WorkerStatus
from management.launchers.link import Link

if TYPE_CHECKING:
    import subprocess

    from engine.address import Address
    from engine.network.credentials import Credentials


class RemoteWorker:
    """A worker with a lease at a TCP address."""

    def __init__(
        self,
        address: Address,
        credentials: Credentials | None,
        process: subprocess.Popen[bytes] | None = None,
        starts: bool = False,
    ) -> None:
        """`process` is set by the launcher that started it here. `starts`: it was started elsewhere just now, and need not listen
        yet. Raises OSError if a worker to take over is not there.
        """
        self._process, self._starts = process, starts
        self.process_id: int | None = None if process is None else process.pid
        self._link = Link(address, credentials)
        self._last: WorkerStatus | None = None
        self._wanted = Wanted.RUN
        self._epoch = 0
        if process is None and not starts and not self._link.wait():
            self._link.close()
            raise OSError(f"no worker answers at {address}")

    def statuses(self) -> list[WorkerStatus]:
        """Decode the lines that have arrived."""
        found = [msgspec.json.decode(line, type=WorkerStatus) for line in self._link.lines()]
        if found:
            self._last, self._starts = found[-1], False
        return found

    @property
    def connected(self) -> bool:
        """Whether there is a connection now."""
        return self._link.connected

    def exit_code(self) -> int | None:
        """The exit status. That of a worker taken over is known only by its last report; without one it was killed."""
        if self._process is not None:
            return self._process.poll()
        if self._wanted is Wanted.END:
            return -signal.SIGKILL
        state = "" if self._last is None else self._last.state
        said = not self._link.connected and state in ("failed", "exited")
        if self._starts or (not said and not self._link.refused):
            return None
        if state == "failed":
            return ExitStatus.MODEL_REFUSED
        return ExitStatus.STOPPED if state == "exited" else -signal.SIGKILL

    def renew(self, epoch: int) -> None:
        """Send a renewal with what is wanted; without a connection it is lost, and the next one counts."""
        self._epoch = epoch
        self._link.send(msgspec.json.encode(Renew(epoch, self._wanted)) + b"\n")

    def drain(self) -> None:
        """Send SIGTERM to a child, or ask for it with the next renewal."""
        self._want(Wanted.DRAIN, signal.SIGTERM)

    def hand_over(self) -> None:
        """Send SIGTERM again, or ask for it with the next renewal."""
        self._want(Wanted.HAND_OVER, signal.SIGTERM)

    def kill(self) -> None:
        """SIGKILL and wait for the end; or tell it to end, and take it for ended."""
        self._want(Wanted.END, signal.SIGKILL)
        if self._process is not None:
            self._process.wait()

    def release(self) -> None:
        """Disconnect; a running worker is left to its lease."""
        self._link.close()

    def _want(self, wanted: Wanted, number: signal.Signals) -> None:
        if self._process is not None:
            self._process.send_signal(number)
        elif self.exit_code() is None:
            self._wanted = wanted
            self.renew(self._epoch)
