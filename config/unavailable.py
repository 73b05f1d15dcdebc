"""What the admin answers while the database is away: 503 and when to come again, on a page that needs no database."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from django.db import DataError, Error, IntegrityError, NotSupportedError, ProgrammingError
from django.http import HttpResponse
from django.views import defaults

if TYPE_CHECKING:
    from collections.abc import Callable

    from django.http import HttpRequest

RETRY_AFTER_S = 5
TRY_AGAIN_LATER = 1013
"""WebSocket's own word for it (https://www.iana.org/assignments/websocket)."""
OURS = (DataError, IntegrityError, NotSupportedError, ProgrammingError)
"""Errors of the database that are faults of the program; every other says that the database cannot serve now."""
PAGE = b"<!doctype html><title>Unavailable</title><h1>The registry is not reachable at the moment</h1><p>Models go on serving."


def is_unavailable(error: BaseException | None) -> bool:
    """Whether an error, or what it came from, says that the database cannot serve now."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        if isinstance(error, Error) and not isinstance(error, OURS):
            return True
        seen.add(id(error))
        error = error.__cause__ or error.__context__
    return False


def server_error(request: HttpRequest) -> HttpResponse:
    """Django's `handler500`: called while the error is handled."""
    if is_unavailable(sys.exc_info()[1]):
        return HttpResponse(PAGE, status=503, headers={"Retry-After": str(RETRY_AFTER_S)})
    return defaults.server_error(request)


def while_available(application: Callable[..., Any]) -> Callable[..., Any]:
    """An ASGI application for WebSockets, which are closed, and are no failure of ours, while the database is away."""

    async def wrapped(scope: dict[str, Any], receive: Any, send: Any) -> None:
        try:
            await application(scope, receive, send)
        except Error as error:
            if not is_unavailable(error):
                raise
            await send({"type": "websocket.close", "code": TRY_AGAIN_LATER})

    return wrapped
