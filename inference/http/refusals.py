"""One log line for every request that was refused: which error, of which field, on which path. Never what was sent.

An error's message may quote the body, so it stays out of the log.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import structlog

if TYPE_CHECKING:
    from inference.errors import ServingError

logger = structlog.get_logger(__name__)

MAX_LOGGED = 200
"""Characters of a path or a field's name, which clients choose."""


def log_refusal(error: ServingError, method: str, path: str, status: int | str, request_id: str) -> None:
    """A request was answered with this error; nothing is logged where its generation's own line says so. `status` is
    HTTP's or gRPC's.
    """
    if error.logged:
        return
    field: str | None = getattr(error, "field", None)
    logger.info(
        "request refused",
        request_id=request_id,
        error=type(error).__name__,
        field=None if field is None else field[:MAX_LOGGED],
        method=method,
        path=path[:MAX_LOGGED],
        status=status,
    )
