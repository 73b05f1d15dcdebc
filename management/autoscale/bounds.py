"""Rules 3 to 5: waking, sleeping, and the limits on the number of workers. No load is measured."""

from __future__ import annotations

from management.autoscale.decision import Rule
from management.autoscale.memory import Memory
from management.autoscale.situation import Move, Situation


def is_asleep_by_hand(memory: Memory, situation: Situation) -> bool:
    """Whether a person stopped the deployment and nothing has woken it since."""
    return situation.observation.stopped and memory.target == 0


def clear(memory: Memory, situation: Situation) -> Move | None:
    """Remove a worker that started although nobody wants it any more."""
    if memory.target or not situation.fleet.live:
        return None
    return situation.shrink(memory, Rule.REPEATED, situation.fleet.victims(situation.fleet.live))


def wake(memory: Memory, situation: Situation) -> Move | None:
    """Rule 3: a request for a sleeping deployment, held or refused for lack of capacity, starts its first workers."""
    if memory.target or memory.failed or situation.fleet.live:
        return None
    if is_asleep_by_hand(memory, situation) and not situation.config.scale_to_zero:
        return None
    recent_s = min(2 * situation.config.tick_s, situation.now - memory.reset_at)
    is_rejected = any(piece.rejected for piece in situation.history.within(situation.now, recent_s))
    if not situation.waiting and not is_rejected:
        return None
    return situation.grow(memory, Rule.WAKE, situation.config.first_workers)


def zero(memory: Memory, situation: Situation) -> Move | None:
    """Rule 4: nothing has happened for the idle timeout, or for one tick if that is longer; all workers go."""
    config, fleet = situation.config, situation.fleet
    if not config.scale_to_zero or not fleet.ready or fleet.starting:
        return None
    if situation.is_unknown or situation.running or situation.waiting:
        return None
    idle_since = max(memory.last_activity_at, memory.unknown_at or memory.last_activity_at)
    if situation.now - idle_since < max(config.idle_timeout_s, config.tick_s):
        return None
    return situation.shrink(memory, Rule.ZERO, fleet.ready)


def above_cap(memory: Memory, situation: Situation) -> Move | None:
    """Rule 5: a limit was lowered. One worker goes per tick or per down window."""
    if situation.fleet.live <= situation.cap.workers:
        return None
    is_due = situation.now - memory.reset_at >= situation.config.down_window_s
    if not is_due and not situation.config.immediate_scale_down:
        return None
    return situation.shrink(memory, Rule.ABOVE_CAP, situation.fleet.victims(1))


def refill(memory: Memory, situation: Situation) -> Move | None:
    """Rules 2 and 5: workers are missing to the minimum, or were wanted and are not there. Ask for them, or ask again.

    The minimum rate counts only once the deployment is active.
    """
    required = situation.config.min_workers
    if situation.config.min_throughput_rate is not None and situation.fleet.ready:
        required = situation.floor
    if memory.failed or is_asleep_by_hand(memory, situation):
        required = 0
    wanted = max(required, memory.target)
    if situation.fleet.live >= wanted:
        return None
    rule = Rule.REPEATED if situation.fleet.live < memory.target else Rule.BELOW_FLOOR
    return situation.grow(memory, Rule.CRASH if situation.observation.crashed else rule, wanted, lasting=True)
