"""How long the step loop waits for masks: never so long that other sequences notice."""

from __future__ import annotations

from collections import deque
from statistics import median

SHARE = 0.25
"""Of a usual step."""
MIN_S, MAX_S = 0.0005, 0.01
STEPS = 31


class Patience:
    """Follows the times of the last decode steps."""

    def __init__(self) -> None:
        self._steps_s: deque[float] = deque(maxlen=STEPS)

    def note(self, elapsed_s: float) -> None:
        """A step without prompt tokens took so long."""
        self._steps_s.append(elapsed_s)

    @property
    def seconds(self) -> float:
        """How long to wait after a step."""
        usual = median(self._steps_s) if self._steps_s else 0.0
        return min(max(usual * SHARE, MIN_S), MAX_S)
