"""The time that the step loop waits for masks: a fraction of a decode step, so that other sequences are not delayed."""

from __future__ import annotations

from collections import deque
from statistics import median

SHARE = 0.25
"""The fraction of the median decode step."""
MIN_S, MAX_S = 0.0005, 0.01
STEPS = 31


class Patience:
    """Derives the waiting time from the durations of the last decode steps."""

    def __init__(self) -> None:
        self._steps_s: deque[float] = deque(maxlen=STEPS)

    def note(self, elapsed_s: float) -> None:
        """Record the duration of a decode step."""
        self._steps_s.append(elapsed_s)

    @property
    def seconds(self) -> float:
        """Seconds to wait for masks after a step."""
        usual = median(self._steps_s) if self._steps_s else 0.0
        return min(max(usual * SHARE, MIN_S), MAX_S)
