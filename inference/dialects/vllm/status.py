"""GET /version and /load, POST /ping; and vLLM's routes that this server does not support, refused by name."""

from __future__ import annotations

from typing import TYPE_CHECKING

from inference.errors import NotServed, Unavailable
from inference.http.exchange import Response, json_response

if TYPE_CHECKING:
    from inference.http.exchange import Exchange
    from inference.services import Services

REFUSED = {
    "POST": (
        "/rerank", "/v1/rerank", "/v2/rerank", "/score", "/v1/score", "/classify", "/generative_scoring", "/v2/embed",
        "/v1/messages", "/v1/messages/count_tokens", "/v1/audio/transcriptions", "/v1/audio/translations",
        "/v1/responses/render", "/inference/v1/generate", "/pause", "/resume", "/abort_requests", "/sleep", "/wake_up",
        "/reset_prefix_cache",
    ),
    "GET": ("/is_paused", "/is_sleeping", "/server_info"),
}  # fmt: skip
"""vLLM's routes that are not served, by method. Those from /pause on are in vLLM's development mode alone; here
deployments are stopped and started (`manage.py stop`), and sleep by themselves.
"""


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
    """Refuse a route by its name."""
    raise NotServed(f"The route {exchange.path} is not supported by this server.")
