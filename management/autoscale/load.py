"""Rules 7 and 8: more workers under load, one fewer without. Both need a full window since the last change."""

from __future__ import annotations

import math

from msgspec.structs import replace

from management.autoscale.config import MAX_FLAP_FACTOR, Strategy
from management.autoscale.decision import Rule
from management.autoscale.limits import ROUNDING
from management.autoscale.memory import Memory
from management.autoscale.situation import Move, Situation

MAX_BACK_OFF_DOUBLINGS = 3
MAX_GROWTH = 2


def up(memory: Memory, situation: Situation) -> Move | None:
    """Rule 7: the metric was above the upper threshold over the window, and still is.

    Latency grows out of proportion to load, so it asks for one more worker; a rate asks for as many as it needs, but at most
    doubles them. After starts that timed out, the window is longer.
    """
    config, ready = situation.config, len(situation.fleet.ready)
    wait_s = config.up_window_s * 2 ** min(memory.failures, MAX_BACK_OFF_DOUBLINGS)
    if not ready or situation.now - memory.reset_at < wait_s:
        return None
    seen = situation.measure(config.up_window_s)
    if seen.value is None or not seen.exceeds(config.upper):
        return None
    if not situation.measure(config.recent_s).exceeds(config.upper):
        return None
    wanted = ready + 1
    if config.strategy is Strategy.RPS:
        needed = math.ceil(min(seen.value * ready / config.upper - ROUNDING, MAX_GROWTH * ready))
        wanted = max(wanted, needed)
    move = situation.grow(memory, Rule.UP, wanted, seen)
    if not move.decision.actions:
        return move
    factor = min(MAX_FLAP_FACTOR, 2 * memory.flap_factor) if _is_flap(memory, situation) else memory.flap_factor
    return Move(replace(move.memory, flap_factor=factor, last_down_at=None), move.decision)


def down(memory: Memory, situation: Situation) -> Move | None:
    """Rule 8: the metric was below the lower threshold over the window, or nothing was measured in it.

    Never while the load is unknown or requests are queued, and never if the remaining workers' rate would exceed the upper
    threshold.
    """
    config, ready = situation.config, len(situation.fleet.ready)
    if ready <= situation.floor or situation.is_unknown or situation.waiting:
        return None
    window_s = config.down_window_s * memory.flap_factor
    known_since = max(memory.reset_at, memory.unknown_at or memory.reset_at)
    if situation.now - known_since < window_s:
        return None
    seen = situation.measure(window_s)
    if seen.value is not None and not seen.is_below(config.lower):
        return None
    if config.strategy is Strategy.RPS and seen.value is not None:
        remaining = seen.value * ready / (ready - 1)
        if remaining > config.upper * (1 + ROUNDING):
            return None
    move = situation.shrink(memory, Rule.DOWN, situation.fleet.victims(1), seen=seen)
    return Move(replace(move.memory, last_down_at=situation.now), move.decision)


def calm(memory: Memory, situation: Situation) -> Memory:
    """After the longest down window without a change, the down window has its own length again."""
    if situation.now - memory.reset_at >= situation.config.down_window_s * MAX_FLAP_FACTOR:
        return replace(memory, flap_factor=1)
    return memory


def _is_flap(memory: Memory, situation: Situation) -> bool:
    """Whether latency rose soon after a worker was removed: it was needed."""
    config = situation.config
    if config.strategy is Strategy.RPS or memory.last_down_at is None:
        return False
    return situation.now - memory.last_down_at <= config.up_window_s + config.down_window_s
