"""Responses of the admin while the database is unavailable: 503 with Retry-After, on a page that needs no database."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from django.db import Error
from django.http import HttpResponse
from django.views import defaults

from management.availability import RETRY_AFTER_S, is_unavailable

if TYPE_CHECKING:
    from collections.abc import Callable

    from django.http import HttpRequest

TRY_AGAIN_LATER = 1013
"""The WebSocket close code "Try Again Later" (https://www.iana.org/assignments/websocket)."""
PAGE = b"<!doctype html><title>Unavailable</title><h1>The registry is not reachable at the moment</h1><p>Models go on serving."


def server_error(request: HttpRequest) -> HttpResponse:
    """Django's `handler500`: called while the error is handled."""
    if is_unavailable(sys.exc_info()[1]):
        return HttpResponse(PAGE, status=503, headers={"Retry-After": str(RETRY_AFTER_S)})
    return defaults.server_error(request)


def while_available(application: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap an ASGI application for WebSockets: connections are closed, without an error of ours, while the database
    is unavailable.
    """

    async def wrapped(scope: dict[str, Any], receive: Any, send: Any) -> None:
        try:
            await application(scope, receive, send)
        except Error as error:
            if not is_unavailable(error):
                raise
            await send({"type": "websocket.close", "code": TRY_AGAIN_LATER})

    return wrapped
