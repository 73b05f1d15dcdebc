"""What people ask for: deletion, a stop, a number of workers. It comes before all rules on load."""

from __future__ import annotations

from msgspec.structs import replace

from management.autoscale.bookkeeping import is_acted
from management.autoscale.decision import Rule
from management.autoscale.memory import Memory
from management.autoscale.situation import Move, Situation


def delete(memory: Memory, situation: Situation) -> Move | None:
    """Remove every worker. Starts are cancelled, ready workers drain, or end at once with `force`."""
    fleet = situation.fleet
    everyone = fleet.starting + fleet.ready + fleet.spares
    if not everyone and memory.target == 0:
        return None
    return situation.shrink(memory, Rule.DELETE, everyone, situation.observation.force)


def stop(memory: Memory, situation: Situation) -> Move | None:
    """Put the deployment to sleep, whatever its minimum. Only a start, or a request if it scales to zero, wakes it."""
    if not situation.observation.stopped or not is_acted(memory, situation.observation):
        return None
    fleet = situation.fleet
    everyone = fleet.starting + fleet.ready + fleet.spares
    return situation.shrink(memory, Rule.STOP, everyone, situation.observation.force)


def scale(memory: Memory, situation: Situation) -> Move | None:
    """Have the number of workers that a person asked for, within the limits. Surplus drains at once."""
    asked = situation.observation.asked
    if asked is None or situation.observation.stopped or not is_acted(memory, situation.observation):
        return None
    fleet = situation.fleet
    wanted = max(asked, situation.config.min_workers)
    if wanted < fleet.live:
        return situation.shrink(memory, Rule.MANUAL, fleet.victims(fleet.live - wanted))
    return situation.grow(memory, Rule.MANUAL, wanted, lasting=True)


def seen(memory: Memory, situation: Situation) -> Memory:
    """The person's action has been taken."""
    return replace(memory, generation=situation.observation.generation)
