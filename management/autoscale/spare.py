"""Fast scaling: one spare worker with its weights in the host's memory, ready to be promoted."""

from __future__ import annotations

from msgspec.structs import replace

from management.autoscale.bounds import is_asleep_by_hand
from management.autoscale.decision import Kill, Prepare, Rule
from management.autoscale.memory import Memory
from management.autoscale.situation import Move, Situation

RECREATE_S = 60.0


def keep_spare(memory: Memory, situation: Situation) -> Move | None:
    """Prepare a spare where none is, at most once a minute, and stop those that nobody wants."""
    fleet = situation.fleet
    is_wanted = situation.config.fast and not memory.failed and not is_asleep_by_hand(memory, situation)
    if surplus := fleet.spares[1 if is_wanted else 0 :]:
        keys = tuple(spare.key for spare in surplus)
        memory = replace(memory, leaving=(*memory.leaving, *keys))
        return Move(memory, situation.decision(Rule.SPARE, memory.target, tuple(Kill(key) for key in keys)))
    if not is_wanted or fleet.spares or fleet.starting or fleet.live >= situation.cap.workers:
        return None
    if memory.spare_at is not None and situation.now - memory.spare_at < RECREATE_S:
        return None
    memory = replace(memory, spare_at=situation.now)
    return Move(memory, situation.decision(Rule.SPARE, memory.target, (Prepare(),)))
