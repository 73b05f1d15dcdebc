"""When to connect again to a worker that could not be reached."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

FIRST_S = 0.25
LONGEST_S = 5.0


class Backoff:
    """Pauses that double from FIRST_S to LONGEST_S with every failure."""

    def __init__(self, clock: Callable[[], float]) -> None:
        """`clock` returns monotonic seconds."""
        self._clock = clock
        self._pause_s, self._until = 0.0, 0.0
        self.reason: str | None = None
        """Why the last attempt failed."""

    @property
    def over(self) -> bool:
        """Whether the pause is over."""
        return self._clock() >= self._until

    def fail(self, reason: str) -> bool:
        """An attempt failed. Returns whether the reason is another than before."""
        self._pause_s = min(max(FIRST_S, 2 * self._pause_s), LONGEST_S)
        self._until = self._clock() + self._pause_s
        changed, self.reason = reason != self.reason, reason
        return changed
