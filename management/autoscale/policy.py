"""The tick: one decision on the number of a deployment's workers. The rules are in the modules that it lists.

A tick is a pure function, to be called every `ScalingConfig.tick_s`, or earlier where a request waits for a sleeping
deployment. It is level-triggered: what the caller has not carried out, it asks for again. Every worker that the caller launches must be among the observed ones at the next tick.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from msgspec.structs import replace

from management.autoscale import bookkeeping, bounds, load, people
from management.autoscale.decision import DeploymentState, Outcome
from management.autoscale.memory import Memory
from management.autoscale.situation import Move, Situation
from management.autoscale.spare import keep_spare

if TYPE_CHECKING:
    from management.autoscale.config import ScalingConfig
    from management.autoscale.observation import Observation
    from management.autoscale.signals import History

Step = Callable[[Memory, Situation], Move | None]

ENDINGS: tuple[Step, ...] = (bookkeeping.end_starts, bookkeeping.give_up)
"""Rules 1 and 2. Each that applies acts."""
RULES: tuple[Step, ...] = (
    people.stop,
    people.scale,
    bounds.clear,
    bounds.wake,
    bounds.zero,
    bounds.above_cap,
    bounds.refill,
)
"""People and rules 3 to 5. Only the first that applies acts."""
LOAD_RULES: tuple[Step, ...] = (load.up, load.down)
"""Rules 7 and 8, after the others. By rule 6 they wait while a worker starts."""


def tick(memory: Memory, config: ScalingConfig, observation: Observation, history: History) -> Outcome:
    """Decide what to do now. The caller stores the outcome's memory and passes it to the next tick."""
    memory = bookkeeping.begin(memory, config, observation, history)
    memory = bookkeeping.count_workers(memory, config, observation, history)
    situation = Situation(memory, config, observation, history)
    memory = bookkeeping.note_rate(memory, situation)
    memory, decisions = bookkeeping.end_drains(memory, situation)
    for end in ENDINGS:
        if move := end(memory, situation):
            memory, decisions = move.memory, (*decisions, move.decision)
            situation = Situation(memory, config, observation, history)
    if observation.deleting:
        rules: tuple[Step, ...] = (people.delete,)
    elif situation.fleet.starting:
        rules = RULES
    else:
        rules = RULES + LOAD_RULES
    move = _first(rules, memory, situation)
    blocked = move.decision.blocked if move else None
    if move:
        is_news = bool(move.decision.actions) or blocked is None or blocked != memory.blocked
        memory = move.memory
        decisions += (move.decision,) if is_news else ()
    else:
        memory = load.calm(memory, situation)
        if not observation.deleting and (move := keep_spare(memory, situation)):
            memory, decisions = move.memory, (*decisions, move.decision)
    memory = replace(people.seen(memory, situation), blocked=blocked)
    return Outcome(
        memory=memory, state=_state(memory, observation, situation), decisions=decisions, scale_blocked=blocked
    )


def _first(rules: tuple[Step, ...], memory: Memory, situation: Situation) -> Move | None:
    return next((move for rule in rules if (move := rule(memory, situation))), None)


def _state(memory: Memory, observation: Observation, situation: Situation) -> DeploymentState:
    """The state after the decisions: workers that are to leave do not count, those that are to start do."""
    if observation.deleting:
        return DeploymentState.DELETING if observation.workers else DeploymentState.DELETED
    if any(worker.key not in memory.leaving for worker in situation.fleet.ready):
        return DeploymentState.ACTIVE
    if memory.target:
        return DeploymentState.PROVISIONING
    return DeploymentState.FAILED if memory.failed else DeploymentState.INACTIVE
