"""Delegation: a dialect's own plane or gRPC service answers a request with a route of the front plane, without knowing whose route
that is.

The plane has admitted the request already (Host, Origin, API key), and only the front's inference routes are reached. The
front's handler takes its own permit, unless the caller holds one, and renders its own responses and streams.
"""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from inference.errors import RouteNotFound, ServingError, Starting
from inference.http.admission import Admission
from inference.http.exchange import Exchange
from inference.http.refusals import log_refusal
from inference.http.routing import route_for
from inference.workers.scope import scope_id, within

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable

    from inference.generation.caller import RpcCaller
    from inference.http.exchange import Send
    from inference.http.routing import Route, RouteTable
    from inference.services import Services

UNLIMITED = 1 << 31


class Delegation:
    """The way to the front plane's routes; `open` is called once, when they exist."""

    def __init__(self) -> None:
        self._table: RouteTable | None = None

    def open(self, table: RouteTable) -> None:
        """The front plane's routes are these."""
        self._table = table

    async def run(
        self,
        exchange: Exchange,
        services: Services,
        path: str,
        body: dict[str, Any],
        public_id: str = "",
        through: Callable[[Send], Send] | None = None,
    ) -> None:
        """Answer `exchange` as the front plane's `path` does, with this JSON body instead of the client's own.

        `public_id` limits the request to one deployment; "" leaves it as limited as it is. `through` wraps what sends the
        response. Raises the ServingError of a refused request, and RouteNotFound without such a route.
        """
        inner = exchange.inner(path, body, through)
        routes, inner.parameters = self._find(inner.method, path)
        try:
            with within(public_id or scope_id()):
                await (await _route(routes, inner)).handler(inner, services)
        finally:
            exchange.status = inner.status

    async def answer(self, exchange: Exchange, services: Services, path: str, public_id: str) -> None:
        """Answer `exchange` as the front plane does at `path`, below the deployment with this public id; errors too. Raises
        RouteNotFound or MethodNotAllowed; Starting if the request can wait.
        """
        routes, parameters = self._find(exchange.method, path)
        outer, exchange.parameters = exchange.parameters, parameters
        route = routes[0]
        try:
            with within(public_id):
                route = await _route(routes, exchange)
                await route.handler(exchange, services)
        except Starting:
            exchange.parameters = outer
            raise
        except ServingError as error:
            if exchange.status:
                raise
            response = route.render(error)
            log_refusal(error, exchange.method, exchange.path, response.status, exchange.request_id)
            await exchange.respond(response)

    async def chunks(
        self, services: Services, caller: RpcCaller, path: str, body: bytes, public_id: str
    ) -> AsyncGenerator[bytes, None]:
        """The body of the front plane's response, in its chunks: of a GET without a `body`, else of a POST of JSON.

        The caller holds a permit. Raises the handler's errors; closing the iterator ends the request.
        """
        method = "POST" if body else "GET"
        routes, parameters = self._find(method, path)
        told: asyncio.Queue[bytes | None] = asyncio.Queue(1)
        unread = [{"type": "http.request", "body": body, "more_body": False}]

        async def receive() -> dict[str, Any]:
            if unread:
                return unread.pop()
            return await asyncio.get_running_loop().create_future()  # the caller's end cancels the task

        async def send(message: dict[str, Any]) -> None:
            if message.get("body"):
                await told.put(message["body"])

        headers = [(b"content-type", b"application/json"), (b"x-request-id", caller.request_id.encode())]
        exchange = Exchange({"method": method, "path": path, "headers": headers}, receive, send)
        exchange.tenant, exchange.parameters = caller.tenant, parameters

        async def run() -> None:
            try:
                route = await _route(routes, exchange)
                await route.handler(exchange, replace(services, admission=Admission(UNLIMITED)))
            finally:
                await told.put(None)

        with within(public_id):  # the task inherits it
            task = asyncio.ensure_future(run())
        try:
            while (chunk := await told.get()) is not None:
                yield chunk
            await task
        finally:
            task.cancel()
            while not told.empty():  # the task may wait for room
                told.get_nowait()
            await asyncio.gather(task, return_exceptions=True)

    async def body(self, services: Services, caller: RpcCaller, path: str, body: bytes, public_id: str) -> bytes:
        """The whole body of the front plane's response; as `chunks`."""
        async with aclosing(self.chunks(services, caller, path, body, public_id)) as chunks:
            return b"".join([chunk async for chunk in chunks])

    def _find(self, method: str, path: str) -> tuple[list[Route], dict[str, str]]:
        if self._table is None:
            raise RouteNotFound("Not Found")
        routes, parameters = self._table.find(method, path)
        if routes[0].scope != "infer":
            raise RouteNotFound("Not Found")
        return routes, parameters


async def _route(routes: list[Route], exchange: Exchange) -> Route:
    return routes[0] if len(routes) == 1 else route_for(routes, await exchange.json())
