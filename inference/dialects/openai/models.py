"""GET /v1/models and /v1/models/{id}: the running deployments and their adapters as vLLM's model cards."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from inference.errors import ModelNotFound
from inference.http.exchange import json_response

if TYPE_CHECKING:
    from inference.http.exchange import Exchange
    from inference.services import Services
    from inference.workers.target import Target


def cards(target: Target, adapter_paths: bool = False) -> list[dict[str, Any]]:
    """The deployment's model card and those of its adapters, with their directories if `adapter_paths`."""
    entry, length = target.entry, target.info.max_model_len
    roots = {a.name: (adapter_paths and a.source) or a.name for a in entry.adapters}
    adapters = [card(a.name, a.created, roots[a.name], entry.name, None) for a in entry.adapters]
    return [card(entry.name, entry.created, entry.model, None, length), *adapters]


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
    data = [one for target in services.router.targets for one in cards(target, services.shown.adapter_paths)]
    await exchange.respond(json_response({"object": "list", "data": data}))


async def retrieve(exchange: Exchange, services: Services) -> None:
    """GET /v1/models/{id}; ids may contain slashes."""
    name = exchange.parameters["id"]
    known = (one for t in services.router.targets for one in cards(t, services.shown.adapter_paths))
    found = next((one for one in known if one["id"] == name), None)
    if found is None:
        raise ModelNotFound(name)
    await exchange.respond(json_response(found))
