"""The autoscaler's part of a reconciliation pass: what one deployment's workers and load are, and what the rules say.

The rules are pure functions (`management.autoscale`). This file observes for them, keeps their memory and the history of
the load, accounts the cost, and turns decisions into audit events. It acts on no worker.
"""

from __future__ import annotations

import math
import os
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import msgspec
import structlog

from management.autoscale import policy
from management.autoscale.cost import cost, current_price
from management.autoscale.decision import DeploymentState, Rule
from management.autoscale.memory import NONE_AFFORDABLE, Failure, Limit, Memory
from management.autoscale.observation import Observation
from management.autoscale.signals import History
from management.load import DeploymentLoad
from management.models import Deployment, Worker
from management.models.capacity import DEFAULT_CAPACITY

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from management.autoscale.decision import Decision, Outcome
    from management.load import LoadReport
    from management.services.snapshots import Registries
    from management.watched import Crashes, Watched

logger = structlog.get_logger(__name__)

_IDLE = DeploymentLoad()
SILENT_DECISIONS = (Rule.REPEATED, Rule.DRAINED)
"""Decisions that repeat or complete an earlier one; they are no audit events."""


OFFSET_PERIOD_S = 60.0

STATES = {
    DeploymentState.PROVISIONING: Deployment.State.PROVISIONING,
    DeploymentState.ACTIVE: Deployment.State.ACTIVE,
    DeploymentState.INACTIVE: Deployment.State.INACTIVE,
    DeploymentState.FAILED: Deployment.State.FAILED,
    DeploymentState.DELETING: Deployment.State.DELETING,
    DeploymentState.DELETED: Deployment.State.DELETED,
}
FAILURES = {
    Failure.START_TIMEOUT: "no worker was ready in time",
    Failure.CRASHES: "workers crashed again and again without serving a request",
}


@dataclass(slots=True)
class Scaler:
    """The rules' state for one deployment. Times are monotonic seconds."""

    memory: Memory
    history: History
    ticked_at: float = -1e9
    outcome: Outcome | None = None
    price_per_hour: float = 0.0
    cost: float = 0.0
    """USD so far; starts from the row's value."""
    accounted_at: float = 0.0
    ready_at_tick: int = -1
    generation: int = 0

    @classmethod
    def of(cls, deployment: Deployment, now: float) -> Scaler:
        """A scaler that goes on from what the row says, as after a restart of this process."""
        known = deployment.observed_generation == deployment.generation
        memory = Memory(
            generation=deployment.observed_generation or None,
            target=deployment.target_workers if known or deployment.observed_generation else 0,
        ).restarted(now)
        return cls(memory, History(deployment.scaling.history_s), cost=deployment.cost, accounted_at=now)

    def due(self, deployment: Deployment, live: int, ready: int, now: float) -> bool:
        """Whether the rules must be asked now: a tick has passed, a person acted, a worker became ready or left, a launch
        is missing, or a request waits for the first worker. `live` and `ready` count workers.
        """
        if live < self.memory.target or self.generation != deployment.generation or self.ready_at_tick != ready:
            return True
        if not ready and not self.memory.target and self._held(deployment, now):
            return True
        return now - self.ticked_at >= deployment.scaling.tick_s

    def account(self, mine: Iterable[Watched], now: float) -> None:
        """Add what the workers of the last call cost since then, and note what all of `mine` cost from now on: those as well that
        only take another's place, and those of a deployment that has failed.
        """
        self.cost += cost(self.price_per_hour, now - self.accounted_at)
        self.price_per_hour, self.accounted_at = current_price(watched.view(0) for watched in mine), now

    def tick(
        self,
        deployment: Deployment,
        mine: Sequence[Watched],
        running: dict[str, int],
        crashed: tuple[str, ...],
        capacity: int,
        unit_price: float | None,
    ) -> Outcome:
        """Ask the rules."""
        now = time.monotonic()
        workers = tuple(watched.view(running.get(watched.worker.incarnation, 0)) for watched in mine)
        self.history.retention_s = deployment.scaling.history_s
        asked, stopped = self._asked(deployment)
        observation = Observation(
            now=now,
            workers=workers,
            generation=deployment.generation,
            asked=asked,
            stopped=stopped,
            deleting=deployment.deleted,
            force=deployment.force,
            crashed=crashed,
            capacity=capacity,
            unit_price=unit_price,
        )
        self.outcome = policy.tick(self.memory, deployment.scaling, observation, self.history)
        self.memory, self.ticked_at, self.generation = self.outcome.memory, now, deployment.generation
        self.ready_at_tick = sum(watched.ready and watched.draining_since is None for watched in mine)
        return self.outcome

    def note_replaced(self, name: str) -> None:
        """Another worker has taken the place of this one, which leaves and is not lost."""
        self.memory = msgspec.structs.replace(
            self.memory, ready=tuple(each for each in self.memory.ready if each != name)
        )

    def _asked(self, deployment: Deployment) -> tuple[int | None, bool]:
        """The number of workers that a person asked for since the last tick, and whether the deployment is stopped.

        A change of the configuration asks for no number, but it wakes a sleeping deployment: people want to see it run.
        """
        seen = self.memory.generation or 0
        if deployment.asked_generation > seen:
            return deployment.replicas or None, deployment.replicas == 0
        asleep = not self.memory.target
        changed = deployment.generation > seen and deployment.replicas > 0
        return (deployment.scaling.first_workers if asleep and changed else None), not deployment.replicas and asleep

    def _held(self, deployment: Deployment, now: float) -> bool:
        config = deployment.scaling
        return any(gauges.held or gauges.waiting for gauges in self.history.valid(now, config.stale_s))


@dataclass(slots=True)
class Offset:
    """What to add to a web process's monotonic seconds to get this process's: the smallest delay of a report is the best estimate.

    It counts for one to two periods, because clocks drift, and one stands still while its machine is suspended.
    """

    began: float
    smallest: float = math.inf
    """Of this period."""
    earlier: float = math.inf
    """Of the period before."""

    def update(self, now: float, at: float) -> float:
        """The offset after a report that was made at its process's time `at` has come in."""
        if now - self.began > OFFSET_PERIOD_S:
            self.began, self.earlier, self.smallest = now, self.smallest, math.inf
        self.smallest = min(self.smallest, now - at)
        return min(self.smallest, self.earlier)


@dataclass(slots=True)
class LoadHistory:
    """Distributes the web processes' reports to the deployments' scalers, and translates their clocks."""

    _offsets: dict[str, Offset] = field(default_factory=dict)
    _seen: dict[str, LoadReport] = field(default_factory=dict)
    running: dict[str, int] = field(default_factory=dict)
    """Unfinished requests by the names of workers' incarnations, of all web processes."""

    def take(self, reports: Sequence[LoadReport], scalers: dict[str, Scaler]) -> None:
        """Take in the last report of each web process; `scalers` are by public id."""
        now = time.monotonic()
        present = {report.process: report for report in reports}
        for name in set(self._seen) - set(present):
            del self._seen[name]
            self._offsets.pop(name, None)
            for scaler in scalers.values():
                scaler.history.sign_off(name)
        running: dict[str, int] = {}
        for name, report in present.items():
            for load in report.deployments.values():
                for worker, count in load.running.items():
                    running[worker] = running.get(worker, 0) + count
            earlier = self._seen.get(name)
            if earlier is report:
                continue
            self._seen[name] = report
            taken_until = -math.inf if earlier is None else earlier.at
            offset = self._offsets.setdefault(name, Offset(now)).update(now, report.at)
            for public_id, scaler in scalers.items():
                load = report.deployments.get(public_id) or _IDLE
                new = [piece for piece in load.slices if piece.at > taken_until]
                slices = tuple(msgspec.structs.replace(piece, at=piece.at + offset) for piece in new)
                gauges = load.gauges
                if gauges.last_activity_at is not None:
                    gauges = msgspec.structs.replace(gauges, last_activity_at=gauges.last_activity_at + offset)
                scaler.history.report(name, report.at + offset, slices, gauges)
        self.running = running


def capacity_for(deployment: Deployment, registries: Registries, live: Sequence[Worker], starts_here: bool) -> int:
    """The most workers that the machines hold for this deployment, beside the `live` ones of the others; `starts_here`: all new ones
    start on this machine, which must hold them.
    """
    total = sum(node.capacity for node in registries.nodes) if registries.nodes else DEFAULT_CAPACITY
    room = total - len(live)
    if starts_here:
        here = os.uname().nodename
        own = next((node.capacity for node in registries.nodes if node.name == here), DEFAULT_CAPACITY)
        room = min(room, own - sum(worker.node == here for worker in live))
    return max(0, sum(worker.deployment_id == deployment.pk for worker in live) + room)


def facts(decision: Decision) -> dict[str, object]:
    """A decision as the details of an audit event and the fields of a log line."""
    measured = decision.measure
    found: dict[str, object] = {
        "rule": decision.rule.value,
        "ready": decision.ready,
        "live": decision.live,
        "cap": decision.cap,
        "wanted": decision.target,
        "upper": decision.upper,
        "lower": decision.lower,
        "actions": [msgspec.to_builtins(action) for action in decision.actions],
    }
    if measured is not None:
        found |= {"metric": measured.value, "samples": measured.samples, "window_s": measured.window_s}
    if decision.blocked is not None:
        found["blocked"] = decision.blocked.value
    return found


def observed_state(outcome: Outcome, mine: Sequence[Watched], crashes: Crashes) -> tuple[str, str, int, str]:
    """State, reason, wanted number of workers and the limit that keeps it from growing, as they are recorded."""
    state = STATES[outcome.state]
    reason = ""
    if outcome.memory.failed is not None:
        reason = FAILURES[outcome.memory.failed]
    elif state == Deployment.State.PROVISIONING or crashes.reason or crashes.late:
        doing = next((w.worker.reason for w in mine if w.worker.state == Worker.State.LOADING), "")
        reason = crashes.late or doing or crashes.reason
    blocked = "" if outcome.scale_blocked is None else outcome.scale_blocked.value
    if outcome.scale_blocked is Limit.MAX_PRICE and not mine:
        blocked = NONE_AFFORDABLE
    return str(state), reason, outcome.memory.target, blocked


def has_failed(deployment: Deployment) -> bool:
    """Whether the row says that this generation has failed, as an earlier server process may have written."""
    current = deployment.observed_generation == deployment.generation
    return current and deployment.state == Deployment.State.FAILED


def last_served_at(scaler: Scaler | None) -> float:
    """When the deployment last served a request, in monotonic seconds; -inf if that is not known."""
    return -math.inf if scaler is None else scaler.history.last_served_at(time.monotonic())
