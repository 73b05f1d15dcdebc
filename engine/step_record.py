"""A launched step of the text engine, and what the flight recorder keeps of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from engine.process.flight import StepRecord, recorder

if TYPE_CHECKING:
    from engine.model_runner import LaunchedStep, StepResult
    from engine.scheduled_batch import ScheduledBatch
    from engine.scheduler import Scheduler


@dataclass(slots=True)
class Step:
    """A step that was launched at `begin`, in monotonic seconds."""

    batch: ScheduledBatch
    result: StepResult | LaunchedStep
    begin: float
    chunks: list[tuple[int, int]]
    record: StepRecord


def recorded(begin: float, batch: ScheduledBatch, chunks: list[tuple[int, int]], scheduler: Scheduler) -> StepRecord:
    """Record a step that is launched at `begin`, in monotonic seconds. `chunks` are those of the batch."""
    prompt_tokens = sum(count for count, _ in chunks)
    record = StepRecord(
        begin,
        len(batch.requests),
        prompt_tokens,
        batch.total_tokens - prompt_tokens,
        len(scheduler.running),
        len(scheduler.waiting),
        scheduler.num_preemptions,
        scheduler.pool.num_usable - scheduler.pool.num_free,
    )
    recorder.add(record)
    return record
