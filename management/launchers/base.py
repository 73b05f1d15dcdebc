"""What every launcher can do."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import msgspec

if TYPE_CHECKING:
    from engine.config import EngineConfig


class WorkerStatus(msgspec.Struct):
    """One line of a worker's status: "loading", "ready", "alive", "failed" or "exited".

    A worker that loads or is alive says about once a second what it is doing, for how many seconds that has not moved on,
    and how many of them are no cause for alarm (`engine.process.progress`).
    """

    state: str
    reason: str = ""
    doing: str = ""
    quiet_s: float = 0.0
    patience_s: float = 0.0

    @property
    def hangs(self) -> bool:
        """Whether what it is doing has not moved on for too long."""
        return self.quiet_s > self.patience_s


class WorkerHandle(Protocol):
    """A launched worker."""

    process_id: int | None

    def statuses(self) -> list[WorkerStatus]:
        """What it reported since the last call."""

    def exit_code(self) -> int | None:
        """None while it runs; negative when a signal ended it."""

    def drain(self) -> None:
        """Ask it to finish its requests and exit."""

    def kill(self) -> None:
        """End it now."""


class Launcher(Protocol):
    """A place where workers run."""

    def launch(self, config: EngineConfig) -> WorkerHandle:
        """Start a worker; raises OSError, and leaves nothing behind, where none can be started now."""

    def socket_path(self, name: str) -> str:
        """Where a worker of that name should listen."""

    def close(self) -> None:
        """End every worker that still runs."""
