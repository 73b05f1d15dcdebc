"""GET /v1/models and /v1/models/{id}: the running deployments as vLLM's model cards."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from inference.asgi import json_response
from inference.errors import ModelNotFound

if TYPE_CHECKING:
    from inference.asgi import Exchange
    from inference.router import Target
    from inference.services import Services


def card(target: Target) -> dict[str, Any]:
    """One model card; `root` is the model's registered name, never a path of the server."""
    entry = target.entry
    permission = {
        "id": f"modelperm-{entry.name}",
        "object": "model_permission",
        "created": entry.created,
        "allow_create_engine": False,
        "allow_sampling": True,
        "allow_logprobs": True,
        "allow_search_indices": False,
        "allow_view": True,
        "allow_fine_tuning": False,
        "organization": "*",
        "group": None,
        "is_blocking": False,
    }
    return {
        "id": entry.name,
        "object": "model",
        "created": entry.created,
        "owned_by": "dragoman",
        "root": entry.model,
        "parent": None,
        "max_model_len": target.info.max_model_len,
        "permission": [permission],
    }


async def list_models(exchange: Exchange, services: Services) -> None:
    """GET /v1/models."""
    cards = [card(target) for target in services.router.targets]
    await exchange.respond(json_response({"object": "list", "data": cards}))


async def retrieve(exchange: Exchange, services: Services) -> None:
    """GET /v1/models/{id}; ids may hold slashes."""
    name = exchange.parameters["id"]
    target = next((t for t in services.router.targets if t.entry.name == name), None)
    if target is None:
        raise ModelNotFound(name)
    await exchange.respond(json_response(card(target)))
