"""POST /v1/load_lora_adapter and /v1/unload_lora_adapter, with vLLM's bodies, statuses and messages."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from engine.adapters.failures import AdapterCode
from inference.errors import AdapterExists, AdapterNameTaken, AdapterNotFound, AdapterRefused, AdapterUnnameable
from inference.http.exchange import Response, json_response
from inference.http.validation import convert

if TYPE_CHECKING:
    from inference.http.exchange import Exchange
    from inference.services import Services

MODULES_TO_SAVE = "modules_to_save"


class LoadRequest(msgspec.Struct):
    """POST /v1/load_lora_adapter."""

    lora_name: str
    lora_path: str
    load_inplace: bool = False
    base_model_name: str | None = None
    is_3d_lora_weight: bool = False


class UnloadRequest(msgspec.Struct):
    """POST /v1/unload_lora_adapter. `lora_int_id` is accepted and ignored, as in vLLM."""

    lora_name: str
    lora_int_id: int | None = None


async def load(exchange: Exchange, services: Services) -> None:
    """Load an adapter; 200 with a message when every worker has loaded it and it is registered."""
    body = convert(await exchange.json(), LoadRequest)
    name = body.lora_name
    if not name or not body.lora_path:
        return await _refuse(
            exchange, 400, "InvalidUserInput", "Both 'lora_name' and 'lora_path' must be provided."
        )  # fmt: skip
    try:
        await services.adapters.load(name, body.lora_path, body.base_model_name, body.load_inplace, exchange.tenant)
    except AdapterExists:
        text = (
            f"The lora adapter '{name}' has already been loaded. If you want to load the adapter in place, set "
            "'load_inplace' to True."
        )
        return await _refuse(exchange, 400, "InvalidUserInput", text)
    except AdapterNotFound:
        text = f"Loading lora {name} failed: No adapter found for {body.lora_path[:1000]}"
        return await _refuse(exchange, 404, "NotFoundError", text)
    except AdapterNameTaken:
        text = f"The lora adapter name '{name}' conflicts with a served base model."
        return await _refuse(exchange, 400, "InvalidUserInput", text)
    except AdapterUnnameable as error:
        return await _refuse(exchange, 400, "InvalidUserInput", error.message)
    except AdapterRefused as error:
        return await _refuse(exchange, 500, "InternalServerError", _vllm_message(error))
    await _say(exchange, f"Success: LoRA adapter '{name}' added successfully.")


async def unload(exchange: Exchange, services: Services) -> None:
    """Unload an adapter: new requests no longer find it; it is freed after the last one that uses it."""
    body = convert(await exchange.json(), UnloadRequest)
    if not body.lora_name:
        return await _refuse(exchange, 400, "InvalidUserInput", "'lora_name' needs to be provided to unload a LoRA.")
    try:
        await services.adapters.unload(body.lora_name, exchange.tenant)
    except AdapterNotFound:
        return await _refuse(exchange, 404, "NotFoundError", f"The lora adapter '{body.lora_name}' cannot be found.")
    await _say(exchange, f"Success: LoRA adapter '{body.lora_name}' removed successfully.")


def _vllm_message(error: AdapterRefused) -> str:
    """The engine's reason, with the phrases that vLLM's clients search for."""
    code, facts = error.code, error.facts
    if code is AdapterCode.RANK:
        return f"LoRA rank {facts['rank']} is greater than max_lora_rank {facts['limit']}."
    if code is AdapterCode.REWRITES_BASE:
        return (
            f"Adapters with init_lora_weights={facts['init']} rewrite the base model's weights and are not supported."
        )
    if facts.get("field") == MODULES_TO_SAVE or MODULES_TO_SAVE in str(facts.get("tensor")).split("."):
        return f"Unsupported modules_to_save: {error.message}"
    return error.message


async def _say(exchange: Exchange, text: str) -> None:
    await exchange.respond(Response(200, text.encode(), b"text/plain; charset=utf-8"))


async def _refuse(exchange: Exchange, status: int, kind: str, text: str) -> None:
    error = {"message": text, "type": kind, "param": None, "code": status}
    await exchange.respond(json_response({"error": error}, status))
