"""Logs one line for every refused request: the error, the field and the path, never the body.

An error's message may quote the body, so it is not logged.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import structlog

if TYPE_CHECKING:
    from engine.adapters.failures import AdapterFailure
    from engine.failures import Failure
    from inference.errors import ServingError

logger = structlog.get_logger(__name__)

MAX_LOGGED = 200
"""Logged characters of a path or field name, which clients choose."""


def log_refusal(error: ServingError, method: str, path: str, status: int | str, request_id: str) -> None:
    """Log a request that was answered with this error, unless the generation's own log line reports it.

    `status` is the HTTP or gRPC status.
    """
    if error.logged:
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
