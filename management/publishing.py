"""What a request of the control plane writes is served by this process before the request is answered: a client that creates
a deployment may ask for it at once. Other processes follow by themselves (`management.changes`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import structlog
from django.db import Error

from management.database_errors import one_line

if TYPE_CHECKING:
    from collections.abc import Callable

    from django.http import HttpRequest, HttpResponse

    Next = Callable[[HttpRequest], HttpResponse]

logger = structlog.get_logger(__name__)

READING = frozenset({"GET", "HEAD", "OPTIONS", "TRACE"})
_refresh: Callable[[], None] | None = None


def set_refresh(refresh: Callable[[], None]) -> None:
    """Set the function that reads the registries and publishes a snapshot of them; it may raise `django.db.Error`."""
    global _refresh
    _refresh = refresh


def publish_writes(get_response: Next) -> Next:
    """The middleware."""

    def answer(request: HttpRequest) -> HttpResponse:
        response = get_response(request)
        if _refresh is not None and request.method not in READING and response.status_code < 400:
            try:
                _refresh()
            except Error as error:  # what was written is committed; it is read when the database is back
                logger.warning("registries not read after a write", error=one_line(error))
        return response

    return answer
