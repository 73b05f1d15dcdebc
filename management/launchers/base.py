"""What every launcher can do."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import msgspec

if TYPE_CHECKING:
    from engine.config import EngineConfig


class WorkerStatus(msgspec.Struct):
    """One line of a worker's status: "loading", "ready", "alive" (a heartbeat), "failed" or "exited"."""

    state: str
    reason: str = ""


class WorkerHandle(Protocol):
    """A launched worker."""

    process_id: int | None

    def statuses(self) -> list[WorkerStatus]:
        """What it reported since the last call."""

    def exit_code(self) -> int | None:
        """None while it runs; negative when a signal ended it."""

    def silent_for_s(self) -> float:
        """Seconds since its last report."""

    def drain(self) -> None:
        """Ask it to finish its requests and exit."""

    def kill(self) -> None:
        """End it now."""


class Launcher(Protocol):
    """A place where workers run."""

    def launch(self, config: EngineConfig) -> WorkerHandle:
        """Start a worker."""

    def socket_path(self, name: str) -> str:
        """Where a worker of that name should listen."""

    def close(self) -> None:
        """End every worker that still runs."""
