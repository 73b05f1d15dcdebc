"""The ASGI applications: the control plane is Django's, the front plane is plain ASGI; the local port tells them apart."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import django

os.environ.setdefault("DJANGO_SETTINGS_MODULE", "config.settings")
django.setup(set_prefix=False)

from channels.auth import AuthMiddlewareStack  # noqa: E402
from channels.routing import ProtocolTypeRouter, URLRouter  # noqa: E402
from channels.security.websocket import AllowedHostsOriginValidator  # noqa: E402
from django.core.asgi import get_asgi_application  # noqa: E402
from django.urls import path  # noqa: E402

from management.status import StatusConsumer  # noqa: E402

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    Application = Callable[..., Awaitable[None]]

# Also what a generic ASGI server would run: the admin alone.
application = ProtocolTypeRouter(
    {
        "http": get_asgi_application(),
        "websocket": AllowedHostsOriginValidator(
            AuthMiddlewareStack(URLRouter([path("ws/status", StatusConsumer.as_asgi())]))
        ),
    }
)


CONTROL_PATHS = ("/admin", "/static/", "/ws/")


class SharedPort:
    """Both planes on one port: the control plane has its paths, the front plane all others."""

    def __init__(self, front: Application, control: Application) -> None:
        self.front, self.control = front, control

    async def __call__(self, scope: dict[str, Any], receive: Any, send: Any) -> None:
        """By the decoded path."""
        await (self.control if scope["path"].startswith(CONTROL_PATHS) else self.front)(scope, receive, send)


class PlaneRouter:
    """Sends each connection to the application of the port that it came in on."""

    def __init__(self, planes: dict[int, Application]) -> None:
        self.planes = planes

    async def __call__(self, scope: dict[str, Any], receive: Any, send: Any) -> None:
        """The port is the listener's own, whatever the Host header says."""
        await self.planes[scope["server"][1]](scope, receive, send)
