"""The ASGI application of a plane: matches the route, checks the API key, runs the handler, and renders errors as the
dialect does.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import structlog

from inference.admission.idempotency import HEADER, checked, fingerprint_of
from inference.admission.standing import FAIRNESS_ID
from inference.errors import InternalError, Overloaded, ServingError
from inference.http.auth import Credentials, deployment_of, tenant_of
from inference.http.exchange import ClientGone, Exchange, Response, request_id_of, trace_of
from inference.http.refusals import MAX_LOGGED, log_refusal
from inference.http.routing import route_for
from inference.telemetry import trace_context
from inference.workers.scope import scope_id, within

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from inference.http.auth import Authenticator
    from inference.http.exchange import Headers, Receive, Send
    from inference.http.routing import Render, Route, RouteTable
    from inference.services import Services
    from management.snapshot import ApiKeyEntry

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
        trace_context.enter(exchange.trace)
        try:
            await self._answer(exchange)
        except ClientGone:
            logger.info("client disconnected", path=exchange.path)
        finally:
            exchange.call.end(exchange.status)

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
            key = self._admit(route, exchange.headers)
            exchange.tenant = tenant_of(key)
            if _infers(route, exchange.method, exchange.headers):
                self._claim(exchange, key)
            with within(deployment_of(key)):
                if len(routes) > 1:
                    route = route_for(routes, await exchange.json())
                    render = route.render
                if _infers(route, exchange.method, exchange.headers):
                    self._follow(exchange, route)
                    await self._once(exchange, route)
                else:
                    await route.handler(exchange, self.services)
        except ServingError as error:
            if exchange.status:  # a handler that has begun a response must end it itself
                raise
            self.services.metrics.answered(error)
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

    def _claim(self, exchange: Exchange, key: ApiKeyEntry | None) -> None:
        """Charge the request to its key, whose balances the response tells, and find its place among others. Raises RateLimited,
        QuotaExhausted or InvalidRequest.
        """
        services = self.services
        try:
            services.rates.admit(key)
        finally:
            exchange.answer_headers = [*exchange.answer_headers, *services.rates.headers(key)]
        exchange.standing = services.standings.of(key, exchange.header)

    async def _once(self, exchange: Exchange, route: Route) -> None:
        """Run the handler, or send what it answered to the same request before (`inference.admission.idempotency`)."""
        store, given = self.services.idempotency, exchange.header(HEADER)
        if given is None or not store.max_bytes:
            await self._handle(exchange, route)
            return
        name = (exchange.tenant, f"{self.name} {scope_id()} {exchange.path}", checked(given))
        chosen = [(exchange.header(header) or "").encode() for header in route.selecting]
        fingerprint = fingerprint_of(exchange.method.encode(), exchange.query.encode(), await exchange.body(), *chosen)
        stored = store.find(name, fingerprint)
        if stored is not None:
            kinds = [value for header, value in stored.headers if header == b"content-type"]
            others = [(header, value) for header, value in stored.headers if header != b"content-type"]
            replayed = [*others, (b"idempotent-replayed", b"true")]
            await exchange.respond(Response(stored.status, stored.body, b"".join(kinds), replayed))
            return
        with store.recording(name, fingerprint) as recording:
            exchange.tap(recording.note)
            await self._handle(exchange, route)
            recording.failed = exchange.failed

    async def _handle(self, exchange: Exchange, route: Route) -> None:
        # A handler that finds a deployment before its first start has sent nothing: it is run again later.
        services, time_left_s = self.services, self.services.time_left_s(exchange.standing)
        await services.router.when_known(exchange.permit_holder, lambda: route.handler(exchange, services), time_left_s)

    def _follow(self, exchange: Exchange, route: Route) -> None:
        """Begin to follow an inference; its response says as which part of which trace."""
        path, request_id = exchange.path[:MAX_LOGGED], exchange.request_id
        exchange.call = self.services.telemetry.http(exchange.method, route.plain_path, path, request_id)
        if exchange.call.trace is not None:
            trace_context.enter(exchange.call.trace)
            exchange.answer_headers.append((b"traceresponse", exchange.call.trace.header.encode()))

    def preview(self, method: str, path: str, headers: dict[bytes, bytes]) -> Response | None:
        """The early response from host, route, origin and key; None if the body is needed."""
        render, balances = self.table.renderer(path), list[tuple[bytes, bytes]]()
        try:
            self.services.sites.check_host(headers)
            routes, _ = self.table.find(method, path)
            render = routes[0].render
            key = self._admit(routes[0], headers)
            if _infers(routes[0], method, headers):
                balances = self.services.rates.headers(key)
                self.services.rates.check(key)
        except ServingError as error:
            refusal = self._refusal(method, path, render, error, headers)
            refusal.headers = [*refusal.headers, *balances]
            return refusal
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
            if len(routes) > 1 or not route.needs_permit or (route.asks is not None and route.asks(headers)):
                return None
            key = self._admit(route, headers)
            try:
                admission.check(tenant_of(key) or headers.get(FAIRNESS_ID.encode(), b"").decode("latin-1"))
            except Overloaded:
                if route.refused is not None:
                    route.refused(self.services)
                raise
        except ServingError as error:
            return self._refusal(method, path, render, error, headers)
        return None

    def refuse(self, method: str, path: str, error: ServingError, headers: dict[bytes, bytes]) -> Response:
        """The error response for a request without a handler."""
        return self._refusal(method, path, self.table.renderer(path), error, headers)

    def _admit(self, route: Route, headers: dict[bytes, bytes]) -> ApiKeyEntry | None:
        """Authenticate: returns the key, None if the route needs none.

        Raises ForeignOrigin, Unauthorized or Forbidden.
        """
        if route.guarded:
            self.services.sites.check_origin(headers)
        if route.scope is None:
            return None
        return self.authenticator.check(Credentials.in_headers(headers), route.scope, self.services.holder.current)

    def _refusal(
        self, method: str, path: str, render: Render, error: ServingError, headers: dict[bytes, bytes]
    ) -> Response:
        """The complete error response to a request that is refused before its exchange begins; also logs it."""
        request_id = request_id_of(headers)
        self.services.metrics.answered(error)
        response = _rendered(render, error)
        trace = trace_of(headers)
        with structlog.contextvars.bound_contextvars(**({} if trace is None else {"trace_id": trace.trace_id})):
            log_refusal(error, method, path, response.status, request_id)
        sites = self.services.sites.answer_headers(headers)
        response.headers = [*response.headers, *self.answer_headers(path, request_id), *sites]
        return response


def _infers(route: Route, method: str, headers: Mapping[bytes, bytes]) -> bool:
    """Whether a request on the route is inference, which has a price and a place among others."""
    if route.asks is not None and route.asks(headers):
        return False
    return route.needs_permit or (route.scope == "infer" and method == "POST")


def _rendered(render: Render, error: ServingError) -> Response:
    """The dialect's error response; a 401 names the scheme, as RFC 9110 section 15.5.2 requires."""
    response = render(error)
    if response.status == 401:
        response.headers = [*response.headers, (b"www-authenticate", b"Bearer")]
    return response
