"""The model repository: lists, starts and stops deployments."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from inference.errors import InvalidRequest, NotServed
from inference.http.exchange import Response, json_response, parse_json

if TYPE_CHECKING:
    from inference.http.exchange import Exchange
    from inference.services import Services
    from inference.workers.registry import DeploymentState

STATES = {"ready": "READY", "starting": "LOADING", "stopping": "UNLOADING"}
POLL_S = 0.2
LOAD_TIMEOUT_S = 600.0


async def http_index(exchange: Exchange, services: Services) -> None:
    """POST /v2/repository/index."""
    body = await _body(exchange)
    ready = body.get("ready", False)
    if not isinstance(ready, bool):
        raise InvalidRequest("Invalid value for 'ready': expected a boolean", "ready")
    await exchange.respond(json_response(await index(services, ready)))


async def http_load(exchange: Exchange, services: Services) -> None:
    """POST /v2/repository/models/{model}/load: responds when the model is ready."""
    body = await _body(exchange)
    await exchange.unless_gone(load(services, exchange.parameters["model"], body.get("parameters"), exchange.tenant))
    await exchange.respond(Response(200, b""))


async def http_unload(exchange: Exchange, services: Services) -> None:
    """POST /v2/repository/models/{model}/unload: responds at once; running requests finish first."""
    await _body(exchange)
    await unload(services, exchange.parameters["model"], exchange.tenant)
    await exchange.respond(Response(200, b""))


async def index(services: Services, ready_only: bool) -> list[dict[str, str]]:
    """Every deployment and its state."""
    entries = [_entry(state) for state in await services.registry.deployments()]
    return [entry for entry in entries if entry["state"] == "READY" or not ready_only]


async def load(services: Services, name: str, parameters: Any, actor: str) -> None:
    """Start a deployment and wait until it is ready; raises InvalidRequest with the reason if it fails."""
    if parameters:
        raise NotServed("load parameters are not supported by this server: a deployment has its own options")
    if not name.strip():
        raise InvalidRequest("Model name cannot be empty. Please enter a valid name to deploy.", "model")
    if any(part.strip() in ("", "..") for part in name.split("/")):
        raise InvalidRequest("model name must not contain path traversal characters", "model")
    if not await services.registry.start_deployment(name, actor or "triton"):
        reason = "failed to poll from model repository: no deployment has this name"
        raise InvalidRequest(f"failed to load '{name[:200]}', {reason}", "model")
    for _ in range(int(LOAD_TIMEOUT_S / POLL_S)):
        states = {state.name: state for state in await services.registry.deployments()}
        connected = any(t.entry.name == name and t.clients for t in services.router.targets)
        if name not in states or states[name].state == "failed":
            reason = states[name].reason if name in states else "it was removed"
            raise InvalidRequest(f"failed to load '{name[:200]}', {reason}", "model")
        if states[name].state == "ready" and connected:
            return
        await asyncio.sleep(POLL_S)
    raise InvalidRequest(f"failed to load '{name[:200]}', it did not become ready in {LOAD_TIMEOUT_S:.0f} s", "model")


async def unload(services: Services, name: str, actor: str) -> None:
    """Stop a deployment."""
    if not await services.registry.stop_deployment(name, actor or "triton"):
        raise InvalidRequest(f"failed to unload '{name[:200]}', no deployment has this name", "model")


def _entry(state: DeploymentState) -> dict[str, str]:
    status = STATES.get(state.state, "UNAVAILABLE")
    reason = "" if status == "READY" else state.reason or state.state
    return {"name": state.name, "version": str(state.version), "state": status, "reason": reason}


async def _body(exchange: Exchange) -> dict[str, Any]:
    """The JSON body, which may be empty."""
    body = await exchange.body()
    return await exchange.work(parse_json, body) if body.strip() else {}
