"""A clock that only the test moves."""

from __future__ import annotations


class Clock:
    """Monotonic seconds."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now

    def pass_s(self, seconds: float) -> None:
        """Move on."""
        self.now += seconds
