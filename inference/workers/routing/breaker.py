"""A circuit breaker per worker: it opens after failures, or when it is tripped, and closes after a probe."""

from __future__ import annotations

from collections import deque
from enum import Enum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

FAILURES = 5
WINDOW_S = 10.0
OPEN_S = 10.0


class BreakerState(Enum):
    """The states of a breaker."""

    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half_open"
    """It lets one request through, the probe, and waits for its end."""


class Breaker:
    """Opens for OPEN_S seconds after FAILURES failures within WINDOW_S; then one probe closes it or opens it again."""

    def __init__(self, clock: Callable[[], float]) -> None:
        """`clock` returns monotonic seconds."""
        self._clock = clock
        self._failures: deque[float] = deque(maxlen=FAILURES)
        self._open_until: float | None = None
        self._probing = False

    @property
    def state(self) -> BreakerState:
        """The state now."""
        if self._open_until is None:
            return BreakerState.CLOSED
        return BreakerState.OPEN if self._clock() < self._open_until else BreakerState.HALF_OPEN

    @property
    def admits(self) -> bool:
        """Whether a request may be sent."""
        state = self.state
        return state is BreakerState.CLOSED or (state is BreakerState.HALF_OPEN and not self._probing)

    def begin(self) -> bool:
        """A request is sent. Returns whether it is the probe, whose end must be told to `succeed`, `fail` or `forget`."""
        if self.state is not BreakerState.HALF_OPEN or self._probing:
            return False
        self._probing = True
        return True

    def succeed(self, probe: bool) -> None:
        """A request ended well: if it was the probe, close."""
        if probe and self.state is BreakerState.HALF_OPEN:
            self._open_until, self._probing = None, False

    def fail(self, probe: bool) -> bool:
        """A request failed by the worker's fault. Returns whether this opened the breaker."""
        now = self._clock()
        if probe and self.state is BreakerState.HALF_OPEN:
            self.trip()
            return True
        self._failures.append(now)
        many = len(self._failures) == FAILURES and now - self._failures[0] <= WINDOW_S
        if not many or self._open_until is not None:
            return False
        self.trip()
        return True

    def forget(self, probe: bool) -> None:
        """A request ended without a verdict, as when its client left: the next one is the probe."""
        if probe:
            self._probing = False

    def trip(self) -> None:
        """Open now."""
        self._open_until, self._probing = self._clock() + OPEN_S, False
        self._failures.clear()
