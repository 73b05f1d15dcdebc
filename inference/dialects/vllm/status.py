"""GET /version and /load, POST /ping; and vLLM's routes that this server does not support, refused by name."""

from __future__ import annotations

from typing import TYPE_CHECKING

from inference.errors import NotServed, Unavailable
from inference.http.exchange import Response, json_response

if TYPE_CHECKING:
    from inference.http.exchange import Exchange
    from inference.services import Services

REFUSED = (
    "/rerank", "/v1/rerank", "/v2/rerank", "/score", "/v1/score", "/pooling", "/classify", "/v1/messages",
    "/v1/audio/transcriptions", "/v1/audio/translations",
)  # fmt: skip


async def version(exchange: Exchange, services: Services) -> None:
    """GET /version."""
    await exchange.respond(json_response({"version": services.version}))


async def load(exchange: Exchange, services: Services) -> None:
    """GET /load: the number of requests in flight."""
    await exchange.respond(json_response({"server_load": services.admission.in_flight}))


async def ping(exchange: Exchange, services: Services) -> None:
    """POST /ping: 200 with an empty body if any worker can take requests."""
    if not services.router.ready or services.admission.draining:
        raise Unavailable("The engine is not available.")
    await exchange.respond(Response(200, b""))


async def refuse(exchange: Exchange, services: Services) -> None:
    """Refuse a route for unsupported model types."""
    raise NotServed(f"The route {exchange.path} is not supported by this server.")
