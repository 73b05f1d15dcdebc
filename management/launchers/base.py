"""What every launcher can do: the contract between the reconciler and a way to place workers.

The reconciler decides how many workers a deployment has and when one is taken for dead; a launcher starts them, hands on
what they say, and ends them. Methods are called one at a time; while one runs, no other
worker is looked after.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import msgspec

if TYPE_CHECKING:
    from engine.config import EngineConfig


class WorkerStatus(msgspec.Struct):
    """A status report of a worker. `state` is "loading", "ready", "alive", "failed" or "exited".

    About once a second a loading or alive worker reports `doing`, its current activity; `quiet_s`, the seconds without
    progress; and `patience_s`, the seconds without progress that are normal (`engine.process.progress`).
    """

    state: str
    reason: str = ""
    doing: str = ""
    quiet_s: float = 0.0
    patience_s: float = 0.0

    @property
    def hangs(self) -> bool:
        """Whether the activity has made no progress for longer than is normal."""
        return self.quiet_s > self.patience_s


class WorkerHandle(Protocol):
    """A launched worker.

    It must end when the server is gone, however that went, and its process must run `engine.__main__`, or speak its
    protocol: the EngineConfig in, lines of status out.
    """

    process_id: int | None
    """On this host; None where the worker runs elsewhere."""

    def statuses(self) -> list[WorkerStatus]:
        """What it reported since the last call, in order; a worker that runs reports about once a second."""

    def exit_code(self) -> int | None:
        """None while it runs; else as subprocess.Popen.returncode: 3 for a refused model, negative when a signal ended it."""

    def drain(self) -> None:
        """Ask it to finish its requests and exit (SIGTERM to the process); it may take as long as it needs."""

    def kill(self) -> None:
        """End it now; `exit_code` is no longer None when this returns."""


class Launcher(Protocol):
    """A place where workers run; registered by name in `management.launchers.LAUNCHERS`."""

    def launch(self, config: EngineConfig) -> WorkerHandle:
        """Start a worker. Raises OSError, with nothing left behind, if none can be started at the moment."""

    def address(self, name: str) -> str:
        """Where a worker of that name should listen (`engine.address`): reached from this process, by no other user, and
        free: `name` is unique among the workers of this server, dead ones included.
        """

    def close(self) -> None:
        """End all running workers."""
