"""Mean TTFT and ITL over the last completed requests, for GET /metrics-json; times start when an engine accepts the
request.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from inference.generation.generation import Observer

if TYPE_CHECKING:
    from inference.generation.generation import Generation


class LatencyWindow(Observer):
    """An observer of generations; only completed requests count."""

    def __init__(self, size: int) -> None:
        self._first_ms: deque[int] = deque(maxlen=size)
        self._between_ms: deque[int] = deque(maxlen=size)

    def started(self, generation: Generation) -> None:
        """No-op: counted in `finished`."""

    def finished(self, generation: Generation, finish: str, token_times: list[float], preemptions: int) -> None:
        """Record a completed request; one with a single token has no ITL."""
        if generation.dialect != "mindie" or finish not in ("stop", "length") or not token_times:
            return
        self._first_ms.append(int((token_times[0] - generation.timings.submitted) * 1e3))
        if len(token_times) > 1:
            mean = (token_times[-1] - token_times[0]) / (len(token_times) - 1)
            self._between_ms.append(int(mean * 1e3))

    @property
    def first_ms(self) -> int:
        """Mean TTFT in milliseconds."""
        return _mean(self._first_ms)

    @property
    def between_ms(self) -> int:
        """Mean ITL in milliseconds."""
        return _mean(self._between_ms)


def _mean(values: deque[int]) -> int:
    return sum(values) // len(values) if values else 0
