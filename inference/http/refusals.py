"""Logs a line for a refused request: the error, the field and the path, never the body.

An error's message may quote the body, so it is not logged. Of many refusals of one kind, as of somebody who guesses
keys, only the first of each span of time are; the rest are counted. The metrics count all.
"""

from __future__ import annotations

import time
from collections import Counter
from typing import TYPE_CHECKING

import structlog

if TYPE_CHECKING:
    from engine.adapters.failures import AdapterFailure
    from engine.failures import Failure
    from inference.errors import ServingError

logger = structlog.get_logger(__name__)

MAX_LOGGED = 200
"""Logged characters of a path or field name, which clients choose."""


SPAN_S = 10.0
LINES = 50
"""Lines of each kind of error that a span has."""


class Sample:
    """Which refusals of a span of time are logged, and how many are not."""

    def __init__(self) -> None:
        self._until = 0.0
        self._seen: Counter[str] = Counter()

    def takes(self, kind: str, now: float) -> bool:
        """Whether to log this refusal. The first one after a span logs what that one left out; `now` in monotonic
        seconds.
        """
        if now >= self._until:
            for name, count in self._seen.items():
                if count > LINES:
                    logger.warning(
                        "requests refused, not logged one by one", error=name, count=count - LINES, seconds=SPAN_S
                    )
            self._until = now + SPAN_S
            self._seen.clear()
        self._seen[kind] += 1
        return self._seen[kind] <= LINES


_sample = Sample()


def log_refusal(error: ServingError, method: str, path: str, status: int | str, request_id: str) -> None:
    """Log a request that was answered with this error, unless the generation's own log line reports it or many of its
    kind came.

    `status` is the HTTP or gRPC status.
    """
    if error.logged or not _sample.takes(type(error).__name__, time.monotonic()):
        return
    field: str | None = getattr(error, "field", None)
    failure: Failure | AdapterFailure | None = getattr(error, "failure", None)
    logger.info(
        "request refused",
        request_id=request_id,
        error=type(error).__name__,
        failure=None if failure is None else failure.code.value,
        field=None if field is None else field[:MAX_LOGGED],
        method=method,
        path=path[:MAX_LOGGED],
        status=status,
    )
