"""The front plane's inference routes for dialects that pass requests on to them, limited to one deployment.

A vendor may serve OpenAI's API below a path of its own, or inside another protocol. Its dialect need not know OpenAI's.
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
from inference.workers.scope import within

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

    from inference.generation.caller import RpcCaller
    from inference.http.routing import Route, RouteTable
    from inference.services import Services

UNLIMITED = 1 << 31


class FrontRoutes:
    """The routes, once the front plane is built."""

    def __init__(self) -> None:
        self._table: RouteTable | None = None

    def use(self, table: RouteTable) -> None:
        """Pass requests on to this table."""
        self._table = table

    async def answer(self, exchange: Exchange, services: Services, path: str, deployment: str) -> None:
        """Answer an HTTP request as the front plane answers it at `path`, below the deployment with this public id; errors
        too. The handler acquires a permit. Raises RouteNotFound or MethodNotAllowed; Starting if the request can wait.
        """
        routes, parameters = self._find(exchange.method, path)
        outer, exchange.parameters = exchange.parameters, parameters
        route = routes[0]
        try:
            with within(deployment):
                if len(routes) > 1:
                    route = route_for(routes, await exchange.json())
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
        self, services: Services, caller: RpcCaller, path: str, body: bytes, deployment: str
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
                route = routes[0] if len(routes) == 1 else route_for(routes, await exchange.json())
                await route.handler(exchange, replace(services, admission=Admission(UNLIMITED)))
            finally:
                await told.put(None)

        with within(deployment):  # the task inherits it
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

    async def body(self, services: Services, caller: RpcCaller, path: str, body: bytes, deployment: str) -> bytes:
        """The whole body of the front plane's response; as `chunks`."""
        async with aclosing(self.chunks(services, caller, path, body, deployment)) as chunks:
            return b"".join([chunk async for chunk in chunks])

    def _find(self, method: str, path: str) -> tuple[list[Route], dict[str, str]]:
        if self._table is None:
            raise RouteNotFound("Not Found")
        routes, parameters = self._table.find(method, path)
        if routes[0].scope != "infer":
            raise RouteNotFound("Not Found")
        return routes, parameters
