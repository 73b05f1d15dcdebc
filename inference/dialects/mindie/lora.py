"""POST /v1/load_lora_adapter and /v1/unload_lora_adapter: plain-text messages, with status 200 for nearly every
error.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from engine.adapters.failures import AdapterCode
from inference.dialects.mindie.answer import body_of
from inference.dialects.mindie.errors import MindieError
from inference.errors import AdapterExists, AdapterNotFound, AdapterRefused, ServingError, TooManyAdapters
from inference.http.exchange import Response

if TYPE_CHECKING:
    from inference.dialects.mindie.state import MindieState
    from inference.http.exchange import Exchange
    from inference.services import Services

NAME = re.compile(r"[a-zA-Z0-9_-]{1,256}")
PATH = re.compile(r"/?(?:[\w\-.]+/)*[\w\-.]*")
NOT_LOADED = "Failed to execute load LoRA request."
CALL = "Call to load LoRA method failed: "


async def load(exchange: Exchange, services: Services, state: MindieState) -> None:
    """Load an adapter. Checks, in this order: name and path, whether it is loaded, free slots, its files."""
    body = await _body(exchange, state)
    if body is None:
        return await _respond(exchange, "Req body converts to json fail.")
    name, path = body.get("lora_name"), body.get("lora_path") or ""
    base = body.get("master_model") or body.get("master_mode") or None
    if not isinstance(name, str) or not NAME.fullmatch(name):
        return await _respond(exchange, "Input invalid lora name", 503)
    if not isinstance(path, str) or not PATH.fullmatch(path) or ".." in path.split("/"):
        return await _respond(exchange, "Input invalid lora path", 503)
    if state.instance is not None:  # adapters of instances with roles are those of config.json
        return await _respond(exchange, "Multi Lora does not support PD separation!")
    await _respond(exchange, await _load(exchange, services, state, name, path, base))


async def _load(exchange: Exchange, services: Services, state: MindieState, name: str, path: str, base: Any) -> str:
    try:
        base = base if isinstance(base, str) else None
        await services.adapters.load(name, path, base, False, exchange.tenant, state.settings.max_loras)
    except AdapterExists:
        return f"The LoRA adapter '{name}' has already been added."
    except TooManyAdapters:
        return (
            "Call to load LoRA method failed:The number of LoRA adapters exceeds 'max_loras', and none are currently "
            "unloading."
        )
    except AdapterNotFound:
        return f"{CALL}Loading LoRA '{name}' failed: No adapter found for '{path}'."
    except AdapterRefused as error:
        if error.code is AdapterCode.RANK:
            return f"{CALL}LoRA rank is greater than max_lora_rank."
        return f"{CALL}The LoRA adapter '{name}' is invalid."
    except ServingError:
        return NOT_LOADED
    return f"Success: LoRA adapter '{name}' added successfully."


async def unload(exchange: Exchange, services: Services, state: MindieState) -> None:
    """Unload an adapter: new requests no longer find it; running ones finish."""
    body = await _body(exchange, state)
    if body is None:
        return await _respond(exchange, "Req body converts to json fail.")
    name = body.get("lora_name")
    if not isinstance(name, str) or not NAME.fullmatch(name):
        return await _respond(exchange, "Input invalid lora name", 503)
    try:
        await services.adapters.unload(name, exchange.tenant)
    except AdapterNotFound:
        return await _respond(exchange, f"The LoRA adapter '{name}' cannot be found.")
    await _respond(exchange, f"Success: LoRA adapter '{name}' removed successfully.")


async def _body(exchange: Exchange, state: MindieState) -> dict[str, Any] | None:
    try:
        return await body_of(exchange, state)
    except MindieError:
        return None


async def _respond(exchange: Exchange, text: str, status: int = 200) -> None:
    """Send plain text with the content type of JSON, as MindIE does."""
    await exchange.respond(Response(status, text.encode()))
