"""The launcher protocol: the contract between the reconciler and a way to run workers.

The reconciler decides how many workers a deployment has and when a worker is dead. A launcher starts workers, passes on
their reports, and ends them. Its methods are called one at a time, and while one runs no other worker is observed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import msgspec

from engine.messages import ModelInfo
from management.launchers.place import ANYWHERE, Place

if TYPE_CHECKING:
    from collections.abc import Mapping

    from engine.config import EngineConfig


class LauncherError(ValueError):
    """The launcher cannot work here; the text says what to set or to install."""


class WorkerStatus(msgspec.Struct):
    """A status report of a worker. `state` is "loading", "ready", "alive", "failed" or "exited"; `model` describes the model
    of a ready worker.

    About once a second a loading or alive worker reports `doing`, its current activity; `quiet_s`, the seconds without
    progress; and `patience_s`, the seconds without progress that are normal (`engine.process.progress`).
    """

    state: str
    reason: str = ""
    doing: str = ""
    quiet_s: float = 0.0
    patience_s: float = 0.0
    model: ModelInfo | None = None
    address: str = ""
    """Where the worker will listen, once, if its launcher knew no address before; with `node`, its machine, and its labels."""
    node: str = ""
    labels: dict[str, str] = {}
    leaves_in_s: float | None = None
    """Seconds until the worker's machine will be taken away."""

    @property
    def hangs(self) -> bool:
        """Whether the activity has made no progress for longer than is normal."""
        return self.quiet_s > self.patience_s


class WorkerHandle(Protocol):
    """A launched worker.

    It must exit when its launcher's process dies for any reason, or, if it is leased, when its lease is not renewed for
    `EngineConfig.lease_s` seconds. Its process runs `engine.__main__`, or speaks the same protocol:
    the EngineConfig in, status lines out.
    """

    process_id: int | None
    """The process id on this machine; None for a worker elsewhere."""

    def statuses(self) -> list[WorkerStatus]:
        """The reports since the last call, in order; never blocks. A running worker reports about once a second."""

    def exit_code(self) -> int | None:
        """None while the worker runs, else as subprocess.Popen.returncode: 3 for a refused model, negative for a signal."""

    def renew(self, epoch: int) -> None:
        """Renew the lease in the leader's epoch; nothing for a worker without a lease. Never blocks."""

    def drain(self) -> None:
        """Ask the worker to finish its requests and exit (SIGTERM); this may take as long as it needs."""

    def hand_over(self) -> None:
        """Ask a draining worker to hand its unfinished requests over to other workers and exit (a second SIGTERM); this
        takes at most a step and the sending of what is unsent.
        """

    def kill(self) -> None:
        """Kill the worker; `exit_code` is not None when this returns. One on another host may not hear of it, and runs on until its
        lease ends; nobody asks it for anything, as its epoch is over.
        """

    def release(self) -> None:
        """Free what this process holds of the worker: it has ended, or another process has taken it over."""


def name_of(worker_id: str, epoch: int) -> str:
    """The name of one incarnation of a worker."""
    return f"{worker_id}/{epoch}"


class Launcher(Protocol):
    """Starts workers in one kind of place, such as processes of this machine. Registered in `management.launchers`."""

    starts_here: bool
    """Whether all workers start on this machine."""

    def launch(
        self, config: EngineConfig, secrets: Mapping[str, str] | None = None, place: Place = ANYWHERE
    ) -> WorkerHandle:
        """Start a worker; `secrets` are environment variables for it alone. A launcher of one machine has no choice of places. Raises
        OSError, with nothing left behind, if none can be started at the moment.
        """

    def adopt(self, address: str, name: str) -> WorkerHandle | None:
        """Take over the worker at this address, which an earlier process launched with a lease; None if none is there. `name`: its
        worker id and epoch, as `name_of` gives it.
        """

    def address(self, name: str) -> str:
        """An address on which the worker of this name should listen (`engine.address`). This process can reach it, others without
        the user's or the cluster's rights cannot. Empty: it is known when the worker has a machine (`WorkerStatus.address`). Raises
        OSError if there is none at the moment. `name` is unique among all workers of this server, ended ones included.
        """

    def threads(self, workers: int) -> int:
        """The engine option `threads`, where it is not set, of one of so many workers; 0: it counts the CPUs itself."""

    def close(self) -> None:
        """End all running workers; leased ones run on until their leases end."""
