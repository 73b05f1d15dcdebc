"""How many requests may be sent a second time, so that retries cannot double the load of workers in trouble."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

RATIO = 0.2
LEAST_PER_S = 3
WINDOW_S = 10


class RetryBudget:
    """Retries of the last WINDOW_S seconds are at most RATIO of the requests, and LEAST_PER_S a second."""

    def __init__(self, clock: Callable[[], float]) -> None:
        """`clock` returns monotonic seconds."""
        self._clock = clock
        self._seconds: deque[list[int]] = deque()
        """Per second, oldest first: the second, its requests, its retries."""

    def note_request(self) -> None:
        """A request was sent for the first time."""
        self._current()[1] += 1

    def withdraw(self) -> bool:
        """Whether a request may be sent once more; if so, it counts."""
        current = self._current()
        requests = sum(second[1] for second in self._seconds)
        retries = sum(second[2] for second in self._seconds)
        if retries + 1 > RATIO * requests + LEAST_PER_S * WINDOW_S:
            return False
        current[2] += 1
        return True

    def _current(self) -> list[int]:
        now = int(self._clock())
        while self._seconds and self._seconds[0][0] <= now - WINDOW_S:
            self._seconds.popleft()
        if not self._seconds or self._seconds[-1][0] != now:
            self._seconds.append([now, 0, 0])
        return self._seconds[-1]
