"""What the caller sees at one tick: the workers, the limits of the hosts, and what people asked for."""

from __future__ import annotations

from enum import StrEnum

import msgspec


class WorkerState(StrEnum):
    """A worker's state. One that is gone is not observed any more."""

    STARTING = "starting"
    READY = "ready"
    DRAINING = "draining"
    SPARE = "spare"


class WorkerView(msgspec.Struct, frozen=True):
    """One worker. `key` names one incarnation of it and is never used again.

    `since` is when the worker entered its state, `launched_at` when it was launched, in monotonic seconds. `running` counts
    its unfinished requests. The price is in USD. A spare has its weights in the host's memory and serves nothing; it is a
    spare from the moment in which it is prepared, and STARTING from the moment in which it is promoted.
    """

    key: str
    state: WorkerState
    since: float
    running: int = 0
    price_per_hour: float = 0.0
    spot: bool = False
    launched_at: float = 0.0


class Observation(msgspec.Struct, frozen=True, kw_only=True):
    """One deployment at `now`, in monotonic seconds.

    `capacity` is the most workers that the hosts can hold, those that run included; None is no limit. `unit_price` is that
    of the next worker in USD per hour; None is unknown. A person's action makes `generation` grow, and acts once: a start or
    scaling with the number of workers `asked`, a stop (`stopped`), or a change of the configuration (neither). `asked` is
    set only with the generation of its action; `stopped` stays until a start, or until a request wakes the deployment.
    `force` ends requests at once where a stop or deletion would drain. `crashed` has the keys of workers that died since the
    last tick; a launch that the caller tries again by itself is not among them.
    """

    now: float
    workers: tuple[WorkerView, ...] = ()
    generation: int = 1
    asked: int | None = None
    stopped: bool = False
    deleting: bool = False
    force: bool = False
    crashed: tuple[str, ...] = ()
    capacity: int | None = None
    unit_price: float | None = 0.0
