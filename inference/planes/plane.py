"""The ASGI application of a plane: matches the route, checks the API key, runs the handler, and renders errors as the
dialect does.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import structlog

from inference.errors import InternalError, Overloaded, ServingError
from inference.http.exchange import ClientGone, Exchange, Response, request_id_of
from inference.http.refusals import log_refusal
from inference.http.routing import route_for

if TYPE_CHECKING:
    from collections.abc import Callable

    from inference.http.auth import Authenticator
    from inference.http.exchange import Headers, Receive, Send
    from inference.http.routing import Render, Route, RouteTable
    from inference.services import Services

logger = structlog.get_logger(__name__)


class Plane:
    """The ASGI application of one route table."""

    def __init__(
        self,
        name: str,
        table: RouteTable,
        services: Services,
        authenticator: Authenticator,
        answer_headers: Callable[[str, str], Headers],
    ) -> None:
        """`answer_headers(path, request_id)` gives the headers of every response, including errors."""
        self.name, self.table, self.services = name, table, services
        self.authenticator, self.answer_headers = authenticator, answer_headers

    async def __call__(self, scope: dict[str, Any], receive: Receive, send: Send) -> None:
        """Handle one HTTP request."""
        if scope["type"] != "http":
            await send({"type": "websocket.close"})
            return
        exchange = Exchange(scope, receive, send)
        sites = self.services.sites
        exchange.answer_headers = [
            *self.answer_headers(exchange.path, exchange.request_id),
            *sites.answer_headers(exchange.headers),
        ]
        structlog.contextvars.bind_contextvars(request_id=exchange.request_id)
        try:
            await self._answer(exchange)
        except ClientGone:
            logger.info("client disconnected", path=exchange.path)

    def rank(self, method: str, path: str) -> int:
        """How closely one of its routes matches; -1 without a match. See `RouteTable.rank`."""
        return self.table.rank(method, path)

    async def _answer(self, exchange: Exchange) -> None:
        render = self.table.renderer(exchange.path)
        sites = self.services.sites
        try:
            sites.check_host(exchange.headers)
            preflight = sites.preflight(exchange.method, exchange.headers)
            if preflight is not None:
                exchange.answer_headers = preflight.headers
                status = 400 if preflight.refused else 200
                await exchange.respond(Response(status, preflight.refused.encode(), b"text/plain"))
                return
            routes, exchange.parameters = self.table.find(exchange.method, exchange.path)
            route = routes[0]
            render = route.render
            exchange.tenant = self._admit(route, exchange.headers)
            if len(routes) > 1:
                route = route_for(routes, await exchange.json())
                render = route.render
            if route.needs_permit or (route.scope == "infer" and exchange.method == "POST"):
                # A handler that finds a deployment before its first start has sent nothing: it is run again later.
                waiting = self.services.router.when_known(
                    exchange.tenant, lambda: route.handler(exchange, self.services)
                )
                await waiting
            else:
                await route.handler(exchange, self.services)
        except ServingError as error:
            if exchange.status:  # a handler that has begun a response must end it itself
                raise
            response = _rendered(render, error)
            log_refusal(error, exchange.method, exchange.path, response.status, exchange.request_id)
            await exchange.respond(response)
        except ClientGone:
            raise
        except Exception:  # outermost handler: an unexpected error is logged here and answered without details
            logger.exception("unhandled error", path=exchange.path)
            if exchange.status:
                raise
            await exchange.respond(render(InternalError("internal error")))

    def preview(self, method: str, path: str, headers: dict[bytes, bytes]) -> Response | None:
        """The early response from host, route, origin and key; None if the body is needed."""
        render = self.table.renderer(path)
        try:
            self.services.sites.check_host(headers)
            routes, _ = self.table.find(method, path)
            render = routes[0].render
            self._admit(routes[0], headers)
        except ServingError as error:
            return self._refusal(method, path, render, error, headers)
        return None

    def overloaded(self, method: str, path: str, headers: dict[bytes, bytes]) -> Response | None:
        """The early response when no permit is free; None if one is, or if the body decides the route."""
        admission = self.services.admission
        if not admission.crowded:
            return None
        render = self.table.renderer(path)
        try:
            routes, _ = self.table.find(method, path)
            route, render = routes[0], routes[0].render
            if len(routes) > 1 or not route.needs_permit:
                return None
            tenant = self._admit(route, headers)
            try:
                admission.check(tenant)
            except Overloaded:
                if route.refused is not None:
                    route.refused(self.services)
                raise
        except ServingError as error:
            return self._refusal(method, path, render, error, headers)
        return None

    def refuse(self, method: str, path: str, error: ServingError) -> Response:
        """The error response for a request without a handler."""
        return self._refusal(method, path, self.table.renderer(path), error, {})

    def _admit(self, route: Route, headers: dict[bytes, bytes]) -> str:
        """Authenticate: returns the key's prefix, "" if the route needs no key.

        Raises ForeignOrigin, Unauthorized or Forbidden.
        """
        if route.guarded:
            self.services.sites.check_origin(headers)
        if route.scope is None:
            return ""
        given = headers.get(b"authorization")
        authorization = None if given is None else given.decode("latin-1")
        key = self.authenticator.check(authorization, route.scope, self.services.holder.current)
        return key.prefix if key else ""

    def _refusal(
        self, method: str, path: str, render: Render, error: ServingError, headers: dict[bytes, bytes]
    ) -> Response:
        """The complete error response to a request that is refused before its exchange begins; also logs it."""
        request_id = request_id_of(headers)
        response = _rendered(render, error)
        log_refusal(error, method, path, response.status, request_id)
        sites = self.services.sites.answer_headers(headers)
        response.headers = [*response.headers, *self.answer_headers(path, request_id), *sites]
        return response


def _rendered(render: Render, error: ServingError) -> Response:
    """The dialect's error response; a 401 names the scheme, as RFC 9110 section 15.5.2 requires."""
    response = render(error)
    if response.status == 401:
        response.headers = [*response.headers, (b"www-authenticate", b"Bearer")]
    return response
