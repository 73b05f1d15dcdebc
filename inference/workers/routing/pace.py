"""The pace of a worker, seconds per decode step as they arrive here, and which worker's pace is an outlier.

A worker may become slow without failing: its CPU is throttled, or a neighbour takes its memory bandwidth.
"""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from collections.abc import Mapping

    from engine.messages import Stats

Key = TypeVar("Key")

RECENT_S, RECENT_STEPS = 1.0, 5.0
"""The recent pace is a decaying mean over this time or number of steps, whichever is longer: so one late step among short
ones changes little, as when another process had the core.
"""
MIN_STEPS = 5
"""Steps after which a pace counts as known."""
HISTORY_STEPS = 200
"""Steps after which a worker's own long-term pace counts as known."""
SLOW_FACTOR = 3.0
MIN_GAP_S = 0.05
"""A worker whose steps take less is no outlier, whatever the others take."""
BUCKET_RATIO = 1.25
HALVE_AT = 10_000
"""Steps after which the history's counts are halved, so that it follows lasting changes."""


@dataclass(frozen=True, slots=True)
class Pace:
    """Seconds per decode step: recently, and the 90th percentile of the long term; None if not known yet.

    A higher percentile would be that of a slow time as soon as it has begun: of 2,000 steps, 20 are the last hundredth.
    """

    recent_s: float | None = None
    p90_s: float | None = None


class PaceMeter:
    """Measures a worker's pace by its reports. Steps with prompt tokens are left out: they are long by right."""

    def __init__(self) -> None:
        self._steps = self._prefill_steps = 0
        self._at: float | None = None
        """When the last step was reported, if the worker had work left then."""
        self._time_s = self._weight = 0.0
        """Of the recent steps, both decaying."""
        self._known = 0
        self._history: dict[int, int] = {}
        self._total = 0

    def report(self, stats: Stats, now: float) -> None:
        """A report arrived at `now` (monotonic seconds)."""
        steps, prefill_steps = stats.steps - self._steps, stats.prefill_steps - self._prefill_steps
        if not steps:
            return
        if self._at is not None and steps > 0 and not prefill_steps:
            self._note((now - self._at) / steps, steps)
        self._steps, self._prefill_steps = stats.steps, stats.prefill_steps
        self._at = now if stats.running else None

    def reset(self) -> None:
        """Forget the recent pace; the next step only begins the measurement."""
        self._time_s = self._weight = 0.0
        self._known, self._at = 0, None

    @property
    def pace(self) -> Pace:
        """The pace as far as it is known."""
        recent = self._time_s / self._weight if self._known >= MIN_STEPS else None
        return Pace(recent, self._p90() if self._total >= HISTORY_STEPS else None)

    def _note(self, gap_s: float, steps: int) -> None:
        kept = math.exp(-min(gap_s * steps / RECENT_S, steps / RECENT_STEPS))
        self._time_s = self._time_s * kept + gap_s * steps
        self._weight = self._weight * kept + steps
        self._known += 1
        bucket = math.ceil(math.log(max(gap_s, 1e-6), BUCKET_RATIO))
        self._history[bucket] = self._history.get(bucket, 0) + 1
        self._total += 1
        if self._total >= HALVE_AT:
            self._history = {b: count // 2 for b, count in self._history.items() if count > 1}
            self._total = sum(self._history.values())

    def _p90(self) -> float:
        """The upper bound of the bucket in which the 90th percentile lies."""
        left = self._total * 0.1
        for bucket in sorted(self._history, reverse=True):
            left -= self._history[bucket]
            if left < 0:
                return BUCKET_RATIO**bucket
        raise RuntimeError("the pace's history is empty")


def outliers(paces: Mapping[Key, Pace], ejected: int) -> list[Key]:
    """The workers to eject, slowest first: a pace of SLOW_FACTOR times the median of the others, and over MIN_GAP_S.

    With a single other worker it must also be SLOW_FACTOR times the worker's own long-term pace. `paces` has the
    deployment's workers that get requests, `ejected` is the number of those that get none for now: never more than half
    of all are ejected.
    """
    slow = {key: recent for key, pace in paces.items() if (recent := pace.recent_s) is not None and recent >= MIN_GAP_S}
    found = []
    for key, recent in slow.items():
        others = [p.recent_s for other, p in paces.items() if other != key and p.recent_s is not None]
        if not others or recent < SLOW_FACTOR * statistics.median(others):
            continue
        own = paces[key].p90_s
        if len(others) > 1 or (own is not None and recent >= SLOW_FACTOR * own):
            found.append(key)
    allowed = (len(paces) + ejected) // 2 - ejected
    return sorted(found, key=lambda key: slow[key], reverse=True)[: max(0, allowed)]
