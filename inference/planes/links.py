"""Each deployment's own address on the front port: `/deployments/{id}/inference/...`, with every inference route of the front.

Below it there is no other deployment, and a key of the deployment opens it. The link of a deployment that has a key of its own
is never open without one, whatever the other routes ask for.
"""

from __future__ import annotations

import re
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from inference.errors import RouteNotFound, ServingError, Unauthorized, Unavailable
from inference.http.exchange import Exchange
from inference.planes.plane import Plane
from inference.workers.scope import within

if TYPE_CHECKING:
    from collections.abc import Iterator

    from inference.http.exchange import Receive, Response, Send

PREFIX = "/deployments/"
_LINK = re.compile(r"/deployments/(?P<id>[0-9a-f]{1,32})/inference(?P<path>/.*)")
OPEN_PATHS = frozenset({"/health"})
STOPPED = "The deployment is stopped."


class LinkPlane(Plane):
    """The front plane's routes, limited to the deployment that the path names."""

    def rank(self, method: str, path: str) -> int:
        """No other plane has these paths."""
        return len(path) + 1 if path.startswith(PREFIX) else -1

    async def __call__(self, scope: dict[str, Any], receive: Receive, send: Send) -> None:
        """Handle one HTTP request."""
        if scope["type"] != "http":
            await super().__call__(scope, receive, send)
            return
        with self._inside(scope["method"], scope["path"]) as path:
            inner = {**scope, "path": path, "raw_path": path.encode()}
            error = self._refused(scope["method"], scope["path"])
            if error is None:
                await super().__call__(inner, receive, send)
                return
            exchange = Exchange(inner, receive, send)
            renderer = self.table.renderer(path)
            await exchange.respond(self._refusal(scope["method"], path, renderer, error, exchange.headers))

    def preview(self, method: str, path: str, headers: dict[bytes, bytes]) -> Response | None:
        """The early response from host, route, origin and key; None if the body is needed."""
        with self._inside(method, path) as inner:
            error = self._refused(method, path)
            if error is not None:
                return self._refusal(method, path, self.table.renderer(inner), error, headers)
            return super().preview(method, inner, headers)

    def overloaded(self, method: str, path: str, headers: dict[bytes, bytes]) -> Response | None:
        """The early response when no permit is free."""
        with self._inside(method, path) as inner:
            return super().overloaded(method, inner, headers)

    def refuse(self, method: str, path: str, error: ServingError, headers: dict[bytes, bytes]) -> Response:
        """The error response for a request without a handler."""
        with self._inside(method, path) as inner:
            return super().refuse(method, inner, error, headers)

    @contextmanager
    def _inside(self, method: str, path: str) -> Iterator[str]:
        """The path below the link, in the scope of its deployment."""
        found = _LINK.fullmatch(path)
        if found is None:
            yield path
            return
        with within(found["id"]):
            yield found["path"]

    def _refused(self, method: str, path: str) -> ServingError | None:
        """Why nothing is served below this link, or None."""
        found, snapshot = _LINK.fullmatch(path), self.services.holder.current
        if found is None:
            return RouteNotFound("Not Found")
        if found["id"] in snapshot.stopped:
            return Unavailable(STOPPED)
        if not snapshot.only(found["id"]).deployments:
            return Unauthorized("Unauthorized") if self.authenticator.required else RouteNotFound("Not Found")
        try:
            routes, _ = self.table.find(method, found["path"])
        except ServingError as error:
            return error
        if routes[0].scope != "infer" and found["path"] not in OPEN_PATHS:
            return RouteNotFound("Not Found")
        return None
