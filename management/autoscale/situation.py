"""What every rule sees at one tick, and what a rule answers."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from management.autoscale.config import ScalingConfig
from management.autoscale.decision import Action, Decision, Promote, Rule, Start
from management.autoscale.fleet import Fleet, fleet_of, removal
from management.autoscale.limits import Cap, cap_of, floor_of
from management.autoscale.memory import Limit, Memory
from management.autoscale.metric import Measure, measure
from management.autoscale.observation import Observation, WorkerView

if TYPE_CHECKING:
    from management.autoscale.signals import History


class Move(msgspec.Struct, frozen=True):
    """A rule has acted: the memory afterwards, and its decision."""

    memory: Memory
    decision: Decision


class Situation:
    """One tick of one deployment, after bookkeeping."""

    def __init__(self, memory: Memory, config: ScalingConfig, observation: Observation, history: History) -> None:
        self.config = config
        self.observation = observation
        self.history = history
        self.now = observation.now
        self.fleet: Fleet = fleet_of(memory, observation)
        self.cap: Cap = cap_of(config, observation, self.fleet)
        self.floor: int = floor_of(config, memory, self.cap)
        gauges = list(history.valid(self.now, config.stale_s))
        self.waiting = sum(gauge.waiting + gauge.held for gauge in gauges)
        self.running = sum(gauge.running for gauge in gauges) + sum(worker.running for worker in self.fleet.ready)
        self.is_unknown = history.is_unknown(self.now, config.stale_s)

    def measure(self, window_s: float) -> Measure:
        """The strategy's metric over the last `window_s`."""
        return measure(self.config, self.history, self.now, window_s, len(self.fleet.ready))

    def decision(
        self,
        rule: Rule,
        target: int,
        actions: tuple[Action, ...] = (),
        seen: Measure | None = None,
        blocked: Limit | None = None,
    ) -> Decision:
        """A decision with the facts of this tick."""
        return Decision(
            rule=rule,
            at=self.now,
            ready=len(self.fleet.ready),
            live=self.fleet.live,
            cap=self.cap.workers,
            target=target,
            upper=self.config.upper,
            lower=self.config.lower,
            measure=seen,
            actions=actions,
            blocked=blocked,
        )

    def grow(self, memory: Memory, rule: Rule, wanted: int, seen: Measure | None = None, lasting: bool = False) -> Move:
        """Have `wanted` workers, or as many as the cap allows; the spare first. Blocked growth changes nothing else, but a `lasting`
        wish where nothing lives stays until there is room or money for it.
        """
        target = min(wanted, self.cap.workers)
        blocked = self.cap.limit if target < wanted else None
        missing = target - self.fleet.live
        if missing <= 0:
            waits = lasting and not self.fleet.live and blocked in (Limit.MAX_PRICE, Limit.CAPACITY)
            kept = wanted if waits else self.fleet.live
            return Move(msgspec.structs.replace(memory, target=kept), self.decision(rule, kept, (), seen, blocked))
        promoted = self.fleet.spares[:1]
        actions: tuple[Action, ...] = tuple(Promote(spare.key) for spare in promoted)
        if missing > len(promoted):
            actions += (Start(missing - len(promoted)),)
        memory = msgspec.structs.replace(
            memory,
            target=target,
            reset_at=self.now,
            spare_at=self.now if promoted else memory.spare_at,
        )
        return Move(memory, self.decision(rule, target, actions, seen, blocked))

    def shrink(
        self,
        memory: Memory,
        rule: Rule,
        victims: tuple[WorkerView, ...],
        at_once: bool = False,
        seen: Measure | None = None,
    ) -> Move:
        """Remove these workers. They count as gone from now on."""
        keys = tuple(worker.key for worker in victims)
        target = self.fleet.live - len([worker for worker in victims if worker not in self.fleet.spares])
        memory = msgspec.structs.replace(
            memory,
            target=target,
            leaving=(*memory.leaving, *keys),
            ready=tuple(key for key in memory.ready if key not in keys),
            reset_at=self.now,
        )
        actions = tuple(removal(worker, at_once) for worker in victims)
        return Move(memory, self.decision(rule, target, actions, seen))
