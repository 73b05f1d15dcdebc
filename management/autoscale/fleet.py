"""The workers of a deployment by what they are good for, and who of them goes first."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from management.autoscale.decision import Abort, Action, Drain, Kill
from management.autoscale.observation import Observation, WorkerState, WorkerView

if TYPE_CHECKING:
    from management.autoscale.memory import Memory


class Fleet(msgspec.Struct, frozen=True):
    """The workers in each state. Those that the rules decided to remove are `leaving`, whatever state they are in."""

    starting: tuple[WorkerView, ...]
    ready: tuple[WorkerView, ...]
    leaving: tuple[WorkerView, ...]
    spares: tuple[WorkerView, ...]

    @property
    def live(self) -> int:
        """The workers that serve or will."""
        return len(self.starting) + len(self.ready)

    @property
    def billed(self) -> tuple[WorkerView, ...]:
        """The workers that cost."""
        return self.starting + self.ready + tuple(w for w in self.leaving if w.state is not WorkerState.SPARE)

    def victims(self, count: int) -> tuple[WorkerView, ...]:
        """The workers to remove first: those that only start, then ready ones."""
        starting = sorted(self.starting, key=lambda worker: -worker.launched_at)
        return (*starting, *sorted(self.ready, key=removal_order))[:count]


def fleet_of(memory: Memory, observation: Observation) -> Fleet:
    """The observed workers, sorted."""
    groups: dict[WorkerState, list[WorkerView]] = {state: [] for state in WorkerState}
    for worker in observation.workers:
        state = WorkerState.DRAINING if worker.key in memory.leaving else worker.state
        groups[state].append(worker)
    return Fleet(
        starting=tuple(groups[WorkerState.STARTING]),
        ready=tuple(groups[WorkerState.READY]),
        leaving=tuple(groups[WorkerState.DRAINING]),
        spares=tuple(groups[WorkerState.SPARE]),
    )


def removal_order(worker: WorkerView) -> tuple[int, bool, float, float]:
    """Fewest running requests, then spot, then the most expensive, then the youngest."""
    return (worker.running, not worker.spot, -worker.price_per_hour, -worker.launched_at)


def removal(worker: WorkerView, at_once: bool) -> Action:
    """The action that removes a worker. Only one that may have requests needs to drain."""
    if worker.state in (WorkerState.STARTING, WorkerState.SPARE):
        return Kill(worker.key)
    return Abort(worker.key) if at_once else Drain(worker.key)
