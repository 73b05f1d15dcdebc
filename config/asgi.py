"""The ASGI applications: the control plane is Django's, the front plane is plain ASGI; selected by the local port."""

from __future__ import annotations

import os
from typing import Any

import django

os.environ.setdefault("DJANGO_SETTINGS_MODULE", "config.settings")
django.setup(set_prefix=False)

from channels.auth import AuthMiddlewareStack  # noqa: E402
from channels.routing import ProtocolTypeRouter, URLRouter  # noqa: E402
from django.core.asgi import get_asgi_application  # noqa: E402
from django.urls import path, re_path  # noqa: E402

from config.options import get_options  # noqa: E402
from config.unavailable import while_available  # noqa: E402
from inference.errors import Forbidden  # noqa: E402
from inference.http.sites import SAFE_METHODS, Sites  # noqa: E402
from management.status import StatusConsumer  # noqa: E402

FOREIGN = 4403
"""WebSocket close code for a connection from a foreign origin."""


class SiteGuard:
    """Refuses cross-site requests to an application that trusts a session."""

    def __init__(self, application: Any, sites: Sites) -> None:
        self._application, self._sites = application, sites

    async def __call__(self, scope: dict[str, Any], receive: Any, send: Any) -> None:
        """Handle one connection."""
        headers = dict(scope["headers"])
        try:
            self._sites.check_host(headers)
            if scope.get("method") not in SAFE_METHODS:  # a WebSocket has no method
                self._sites.check_origin(headers)
        except Forbidden as error:
            await _refuse(scope, send, error.message)
            return
        await self._application(scope, receive, send)


async def _refuse(scope: dict[str, Any], send: Any, message: str) -> None:
    if scope["type"] == "websocket":
        await send({"type": "websocket.close", "code": FOREIGN})
        return
    body = message.encode()
    headers = [(b"content-type", b"text/plain; charset=utf-8"), (b"content-length", b"%d" % len(body))]
    await send({"type": "http.response.start", "status": 403, "headers": headers})
    await send({"type": "http.response.body", "body": body})


async def no_such_socket(scope: dict[str, Any], receive: Any, send: Any) -> None:
    """Refuse a WebSocket on an unknown path before it opens."""
    await send({"type": "websocket.close"})


# The entry point for a generic ASGI server: only the admin.
application = SiteGuard(
    ProtocolTypeRouter(
        {
            "http": get_asgi_application(),
            "websocket": while_available(
                AuthMiddlewareStack(
                    URLRouter([path("ws/status", StatusConsumer.as_asgi()), re_path("", no_such_socket)])
                )
            ),
        }
    ),
    Sites(get_options().own_hosts),
)


CONTROL_PATHS = ("/admin", "/static/", "/ws/", "/sg_inf", "/secret", "/user/verify")


class ControlPlane:
    """Django's application as a plane."""

    def rank(self, method: str, path: str) -> int:
        """How closely a path matches: no other plane has the control plane's own paths."""
        return len(path) + 1 if path.startswith(CONTROL_PATHS) else -1

    async def __call__(self, scope: dict[str, Any], receive: Any, send: Any) -> None:
        """Handle one connection."""
        await application(scope, receive, send)


class SharedPort:
    """Several planes on one port: the plane with the closest matching route serves a path; the first handles unknown
    paths.
    """

    def __init__(self, planes: list[Any]) -> None:
        self.planes = planes

    def plane_of(self, method: str, path: str) -> Any:
        """The plane of a method and decoded path; the first one among equals."""
        if len(self.planes) == 1:
            return self.planes[0]
        return max(self.planes, key=lambda plane: plane.rank(method, path))

    async def __call__(self, scope: dict[str, Any], receive: Any, send: Any) -> None:
        """Handle one connection."""
        await self.plane_of(scope.get("method", "GET"), scope["path"])(scope, receive, send)


class PlaneRouter:
    """Dispatches each connection to the planes of its local address, whatever the Host header says."""

    def __init__(self, listeners: dict[tuple[str, int], SharedPort]) -> None:
        self._exact = listeners
        wild = {port: planes for (host, port), planes in listeners.items() if host in ("0.0.0.0", "::")}
        self._by_port = {**{port: planes for (_, port), planes in listeners.items()}, **wild}

    def planes_of(self, host: str, port: int) -> SharedPort:
        """The planes that listen on an address; a wildcard listener matches every address."""
        return self._exact.get((host, port)) or self._by_port[port]

    async def __call__(self, scope: dict[str, Any], receive: Any, send: Any) -> None:
        """Handle one connection."""
        await self.planes_of(*scope["server"])(scope, receive, send)
