"""What a request of the control plane writes is served by this process before the request is answered: a client that
creates a deployment may ask for it at once. Other processes follow by themselves (`management.changes`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import structlog

from management import changes

if TYPE_CHECKING:
    from collections.abc import Callable

    from django.http import HttpRequest, HttpResponse

    Next = Callable[[HttpRequest], HttpResponse]

logger = structlog.get_logger(__name__)

_refresh: Callable[[], None] | None = None


def set_refresh(refresh: Callable[[], None]) -> None:
    """Set the function that reads the registries and publishes a snapshot of them; it may raise `django.db.Error`."""
    global _refresh
    _refresh = refresh


def publish_writes(get_response: Next) -> Next:
    """The middleware."""

    def answer(request: HttpRequest) -> HttpResponse:
        wrote: list[bool] = []
        token = changes.written.set(wrote)
        try:
            response = get_response(request)
        finally:
            changes.written.reset(token)
        if wrote and _refresh is not None:
            try:
                _refresh()
            except Exception:  # what was written is committed, and read by the next pass of who follows the registries
                logger.warning("registries not read after a write", exc_info=True)
        return response

    return answer
