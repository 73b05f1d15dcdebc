"""Health, metadata, configuration and statistics over HTTP."""

from __future__ import annotations

from typing import TYPE_CHECKING

from inference.dialects.triton.model import EXTENSIONS, configuration, find, metadata
from inference.dialects.triton.statistics import settings_of, statistics_of
from inference.errors import ModelNotFound, Unavailable
from inference.http.exchange import json_response

if TYPE_CHECKING:
    from inference.http.exchange import Exchange
    from inference.services import Services


def server_ready(services: Services) -> bool:
    """Whether any model can take a request."""
    return services.router.ready and not services.admission.draining


def model_ready(services: Services, name: str, version: str) -> bool:
    """Whether this model can take a request, a sleeping one included; raises ModelNotFound."""
    try:
        target = find(services.router, name, version)
    except Unavailable:
        return False
    return target.asleep or any(client.usable for client in target.clients.values())


async def live(exchange: Exchange, services: Services) -> None:
    """GET /v2/health/live."""
    await exchange.respond(json_response({"live": True}))


async def ready(exchange: Exchange, services: Services) -> None:
    """GET /v2/health/ready."""
    is_ready = server_ready(services)
    await exchange.respond(json_response({"ready": is_ready}, 200 if is_ready else 400))


async def ready_model(exchange: Exchange, services: Services) -> None:
    """GET /v2/models/{model}/ready; an unknown model is not ready."""
    name = exchange.parameters["model"]
    try:
        is_ready = model_ready(services, name, exchange.parameters.get("version", ""))
    except ModelNotFound:
        is_ready = False
    if is_ready:
        await exchange.respond(json_response({"name": name, "ready": True}))
    else:
        await exchange.respond(json_response({"error": "Model version not ready"}, 400))


async def server(exchange: Exchange, services: Services) -> None:
    """GET /v2."""
    name = settings_of(services).triton_server_name
    await exchange.respond(json_response({"name": name, "version": services.version, "extensions": EXTENSIONS}))


async def model(exchange: Exchange, services: Services) -> None:
    """GET /v2/models/{model}."""
    name, version = exchange.parameters["model"], exchange.parameters.get("version", "")
    await exchange.respond(json_response(metadata(find(services.router, name, version), name)))


async def config(exchange: Exchange, services: Services) -> None:
    """GET /v2/models/{model}/config."""
    name, version = exchange.parameters["model"], exchange.parameters.get("version", "")
    await exchange.respond(json_response(configuration(find(services.router, name, version), name)))


async def statistics(exchange: Exchange, services: Services) -> None:
    """GET /v2/models/{model}/stats."""
    name, version = exchange.parameters["model"], exchange.parameters.get("version", "")
    target = find(services.router, name, version)
    entry = statistics_of(services).of(target.entry.name, name, str(target.entry.version))
    await exchange.respond(json_response({"model_stats": [entry]}))


async def all_statistics(exchange: Exchange, services: Services) -> None:
    """GET /v2/models/stats."""
    entries = [target.entry for target in services.router.targets]
    statistics_entries = [statistics_of(services).of(e.name, e.name, str(e.version)) for e in entries]
    await exchange.respond(json_response({"model_stats": statistics_entries}))
