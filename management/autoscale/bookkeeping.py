"""Rules 0 to 2: the clock and windows, workers that became ready, drained, started too long or died. They always run."""

from __future__ import annotations

from typing import TYPE_CHECKING

from msgspec.structs import replace

from management.autoscale.decision import Abort, Action, Decision, Kill, Rule
from management.autoscale.fleet import removal
from management.autoscale.limits import NOMINAL_RATE
from management.autoscale.memory import Failure, Memory, ServedRate
from management.autoscale.observation import Observation, WorkerState, WorkerView
from management.autoscale.situation import Move, Situation

if TYPE_CHECKING:
    from management.autoscale.config import ScalingConfig
    from management.autoscale.signals import History

CRASHES = 3
CRASH_PERIOD_S = 600.0
RATE_PERIOD_S = 3600.0
RATE_STEP_S = 60.0


def begin(memory: Memory, config: ScalingConfig, observation: Observation, history: History) -> Memory:
    """The tick's time and knowledge. Windows begin anew after a restart, a delayed tick and a person's action."""
    now = observation.now
    is_first = memory.ticked_at is None
    delayed = memory.ticked_at is not None and now - memory.ticked_at > config.stale_s
    if memory.generation is None:
        memory = replace(memory, target=_live(observation), ready=_ready(memory, observation))
    if is_acted(memory, observation):
        memory = replace(
            memory, failures=0, failed=None, crashed_at=(), flap_factor=1, last_down_at=None, last_activity_at=now
        )
    if is_first:
        memory = replace(memory, last_activity_at=now)
    if is_first or delayed or is_acted(memory, observation):
        memory = replace(memory, reset_at=now)
    if history.is_unknown(now, config.stale_s):
        memory = replace(memory, unknown_at=now)
    if history.last_activity_at is not None:
        memory = replace(memory, last_activity_at=max(memory.last_activity_at, history.last_activity_at))
    return replace(memory, ticked_at=now)


def is_acted(memory: Memory, observation: Observation) -> bool:
    """Whether a person has acted since the last tick."""
    return memory.generation != observation.generation


def count_workers(memory: Memory, config: ScalingConfig, observation: Observation, history: History) -> Memory:
    """Note who became ready and who was lost. A lost worker is wanted again only below the floor."""
    now = observation.now
    served_at = history.last_served_at(now)
    crashes = (*memory.crashed_at, *(now for key in observation.crashed if key not in memory.leaving))
    memory = replace(memory, crashed_at=tuple(at for at in crashes if at > served_at and now - at <= CRASH_PERIOD_S))
    keys = {worker.key for worker in observation.workers}
    memory = replace(
        memory,
        leaving=tuple(key for key in memory.leaving if key in keys),
        ending=tuple(key for key in memory.ending if key in keys),
    )
    ready = _ready(memory, observation)
    if lost := [key for key in memory.ready if key not in ready]:
        target = max(memory.target - len(lost), config.first_workers) if memory.target else 0
        memory = replace(memory, target=target, reset_at=now)
    if any(key not in memory.ready for key in ready):
        activity_at = memory.last_activity_at if memory.ready else max(memory.last_activity_at, now)
        memory = replace(memory, reset_at=now, failures=0, last_activity_at=activity_at)
    return replace(memory, ready=ready)


def note_rate(memory: Memory, situation: Situation) -> Memory:
    """Remember the highest rate that workers have shown to complete within the last hour.

    A rate below the nominal one says what a worker can do only while requests waited; otherwise it says what was asked.
    """
    config, now = situation.config, situation.now
    ready = len(situation.fleet.ready)
    served = tuple(entry for entry in memory.served if now - entry.at < RATE_PERIOD_S)
    if config.min_throughput_rate is not None and ready and now - memory.reset_at >= config.up_window_s:
        completions = sum(piece.completions for piece in situation.history.within(now, config.up_window_s))
        rate = completions / config.up_window_s / ready
        is_known = rate > NOMINAL_RATE or (situation.waiting > 0 and rate > 0)
        higher = tuple(entry for entry in served if entry.rate > rate)
        if is_known and not (higher and now - higher[-1].at < RATE_STEP_S):
            served = (*higher, ServedRate(now, rate))
    return replace(memory, served=served)


def end_drains(memory: Memory, situation: Situation) -> tuple[Memory, tuple[Decision, ...]]:
    """Stop workers that have drained, or drained too long, and ask again for removals that have not happened."""
    actions: dict[Rule, list[Action]] = {}
    ending = list(memory.ending)
    for worker in situation.fleet.leaving:
        rule, action = _ending(memory, situation, worker)
        if action is not None:
            actions.setdefault(rule, []).append(action)
        if isinstance(action, Abort | Kill) and worker.key not in ending:
            ending.append(worker.key)
    decisions = tuple(situation.decision(rule, memory.target, tuple(items)) for rule, items in actions.items())
    return replace(memory, ending=tuple(ending)), decisions


def is_at_once(memory: Memory, observation: Observation) -> bool:
    """Whether a person wants no drain."""
    return observation.force and (observation.deleting or (observation.stopped and memory.target == 0))


def end_starts(memory: Memory, situation: Situation) -> Move | None:
    """Rule 1, start timeout: without any other worker, the deployment has failed. The next growth waits longer."""
    now, fleet = situation.now, situation.fleet
    late = tuple(worker for worker in fleet.starting if now - worker.since > situation.config.start_timeout_s)
    if not late:
        return None
    failed = Failure.START_TIMEOUT if fleet.live == len(late) else None
    memory = replace(memory, failures=memory.failures + len(late), failed=failed)
    return situation.shrink(memory, Rule.START_TIMEOUT, late)


def give_up(memory: Memory, situation: Situation) -> Move | None:
    """Rule 2, crashes: three within 10 minutes and no served request, and nothing is ready: the deployment has failed."""
    if memory.failed or situation.fleet.ready or len(memory.crashed_at) < CRASHES:
        return None
    memory = replace(memory, failed=Failure.CRASHES)
    return situation.shrink(memory, Rule.CRASH, situation.fleet.starting)


def _ending(memory: Memory, situation: Situation, worker: WorkerView) -> tuple[Rule, Action | None]:
    at_once = is_at_once(memory, situation.observation)
    if worker.state is not WorkerState.DRAINING:
        return Rule.REPEATED, removal(worker, at_once)
    if worker.running and not at_once and situation.now - worker.since <= situation.config.drain_timeout_s:
        return Rule.DRAINED, None
    rule = Rule.DRAIN_TIMEOUT if worker.running else Rule.DRAINED
    action: Action = Abort(worker.key) if worker.running else Kill(worker.key)
    return Rule.REPEATED if worker.key in memory.ending else rule, action


def _ready(memory: Memory, observation: Observation) -> tuple[str, ...]:
    return tuple(
        worker.key
        for worker in observation.workers
        if worker.state is WorkerState.READY and worker.key not in memory.leaving
    )


def _live(observation: Observation) -> int:
    return sum(worker.state in (WorkerState.STARTING, WorkerState.READY) for worker in observation.workers)
