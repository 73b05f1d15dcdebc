"""Answers of the front plane: OpenAI's for inputs with `url_path`, in the chunks in which HTTP would have them, and `infer`'s."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from inference.http.exchange import Exchange

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

    from inference.generation.caller import Caller
    from inference.services import Services


async def chunks_of(
    services: Services, caller: Caller, path: str, body: dict[str, Any] | None, public_id: str
) -> AsyncGenerator[bytes, None]:
    """The chunks of the front plane's answer at `path`, to a GET without a `body`, else to a POST of it, for the deployment
    with this public id. The caller holds a permit. Raises the handler's errors; closing the iterator ends the request.
    """
    told: asyncio.Queue[bytes | None] = asyncio.Queue(1)

    async def receive() -> dict[str, Any]:
        return await asyncio.get_running_loop().create_future()  # no client goes before the call is cancelled

    async def send(message: dict[str, Any]) -> None:
        if message.get("body"):
            await told.put(message["body"])

    headers = [(b"x-request-id", caller.request_id.encode())]
    exchange = Exchange({"method": "GET" if body is None else "POST", "path": path, "headers": headers}, receive, send)
    exchange.tenant, exchange.standing = caller.tenant, caller.standing

    async def run() -> None:
        try:
            await services.delegation.run(exchange, path, body or {}, public_id, permitted=True)
        finally:
            await told.put(None)

    task = asyncio.ensure_future(run())
    try:
        while (chunk := await told.get()) is not None:
            yield chunk
        await task
    finally:
        task.cancel()
        while not told.empty():  # it may wait for room
            told.get_nowait()
        await asyncio.gather(task, return_exceptions=True)
