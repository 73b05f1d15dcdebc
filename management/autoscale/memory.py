"""What the rules remember from one tick to the next."""

from __future__ import annotations

from enum import StrEnum

import msgspec


class Failure(StrEnum):
    """Why a deployment failed. A person's action clears it."""

    START_TIMEOUT = "start_timeout"
    CRASHES = "crashes"


class Limit(StrEnum):
    """The limit that keeps a deployment from growing."""

    MAX_WORKERS = "max_workers"
    MAX_PRICE = "max_price_per_hour"
    CAPACITY = "capacity"


NONE_AFFORDABLE = "max_price_allows_none"
"""Recorded in place of MAX_PRICE where no worker lives: the deployment cannot even begin."""


class ServedRate(msgspec.Struct, frozen=True):
    """Requests per second that a worker has completed, and when."""

    at: float
    rate: float


class Memory(msgspec.Struct, frozen=True, kw_only=True):
    """The state of one deployment's rules. It can be stored as JSON; times are monotonic seconds of one process.

    `generation` is the last one seen, None before the first tick. `target` is the number of workers wanted; 0 while the
    deployment sleeps. `ready` and `leaving` are keys of workers: those seen ready, and those that the rules have decided to
    remove. `reset_at` is the last change; windows begin there. `unknown_at` is the last tick without knowledge of the load.
    `failures` counts starts that timed out since a worker became ready, `crashed_at` crashes since a request was served.
    `flap_factor` lengthens the down window;
    `last_down_at` is the last removal under load that no growth has followed. `served` falls from the highest rate of the last hour.
    """

    generation: int | None = None
    target: int = 0
    ready: tuple[str, ...] = ()
    leaving: tuple[str, ...] = ()
    ending: tuple[str, ...] = ()
    ticked_at: float | None = None
    reset_at: float = 0.0
    last_activity_at: float = 0.0
    unknown_at: float | None = None
    failures: int = 0
    failed: Failure | None = None
    crashed_at: tuple[float, ...] = ()
    flap_factor: int = 1
    last_down_at: float | None = None
    spare_at: float | None = None
    served: tuple[ServedRate, ...] = ()
    blocked: Limit | None = None

    def restarted(self, now: float) -> Memory:
        """The memory in a new process, whose clock has another zero: windows and idle time begin now."""
        return msgspec.structs.replace(
            self,
            ticked_at=None,
            reset_at=now,
            last_activity_at=now,
            unknown_at=None,
            crashed_at=(),
            last_down_at=None,
            spare_at=None,
            served=(),
        )
