"""GET /v1/models and /v1/models/{id}: the running deployments and their adapters as vLLM's model cards."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from inference.errors import ModelNotFound
from inference.http.exchange import json_response
from inference.workers.listing import usable_models

if TYPE_CHECKING:
    from inference.http.exchange import Exchange
    from inference.services import Services


def cards(services: Services) -> list[dict[str, Any]]:
    """The model cards of all deployments that can be used and of their adapters, with their directories if the operator
    shows them.
    """
    found = []
    for target, adapters in usable_models(services.router):
        entry, length = target.entry, target.info.max_model_len
        found.append(card(entry.name, entry.created, entry.model, None, length))
        for name, adapter in adapters.items():
            root = (services.shown.adapter_paths and adapter.source) or adapter.name
            found.append(card(name, adapter.created, root, entry.name, None))
    return found


def card(name: str, created: int, root: str, parent: str | None, max_model_len: int | None) -> dict[str, Any]:
    """One model card; `root` is a registered name, and a path of the server only if the operator shows it."""
    permission = {
        "id": f"modelperm-{name}",
        "object": "model_permission",
        "created": created,
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
        "id": name,
        "object": "model",
        "created": created,
        "owned_by": "dragoman",
        "root": root,
        "parent": parent,
        "max_model_len": max_model_len,
        "permission": [permission],
    }


async def list_models(exchange: Exchange, services: Services) -> None:
    """GET /v1/models."""
    await exchange.respond(json_response({"object": "list", "data": cards(services)}))


async def retrieve(exchange: Exchange, services: Services) -> None:
    """GET /v1/models/{id}; ids may contain slashes."""
    name = exchange.parameters["id"].removesuffix("/")
    found = next((one for one in cards(services) if one["id"] == name), None)
    if found is None:
        raise ModelNotFound(name)
    await exchange.respond(json_response(found))
