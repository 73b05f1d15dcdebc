"""POST /v1/load_lora_adapter and /v1/unload_lora_adapter, with vLLM's bodies, statuses and sentences."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import msgspec

from inference.errors import AdapterExists, AdapterNotFound, AdapterRefused
from inference.http.exchange import Response, json_response
from inference.http.validation import convert

if TYPE_CHECKING:
    from inference.http.exchange import Exchange
    from inference.services import Services

RANK = re.compile(r"the rank must be between 1 and (\d+), got (\d+)")
INITIALISED = re.compile(r"init_lora_weights '(\w+)' rewrites")
IS_A_MODEL = re.compile(r"The name .* is a model's")


class LoadRequest(msgspec.Struct):
    """POST /v1/load_lora_adapter."""

    lora_name: str
    lora_path: str
    load_inplace: bool = False
    base_model_name: str | None = None
    is_3d_lora_weight: bool = False


class UnloadRequest(msgspec.Struct):
    """POST /v1/unload_lora_adapter. `lora_int_id` is accepted and ignored, as vLLM does."""

    lora_name: str
    lora_int_id: int | None = None


async def load(exchange: Exchange, services: Services) -> None:
    """200 and a sentence when every worker has read the adapter and the registry has it."""
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
    except AdapterRefused as error:
        if IS_A_MODEL.search(error.message):
            text = f"The lora adapter name '{name}' conflicts with a served base model."
            return await _refuse(exchange, 400, "InvalidUserInput", text)
        return await _refuse(exchange, 500, "InternalServerError", _in_vllms_words(error.message))
    await _say(exchange, f"Success: LoRA adapter '{name}' added successfully.")


async def unload(exchange: Exchange, services: Services) -> None:
    """New requests stop seeing the adapter at once; it is freed behind the last that uses it."""
    body = convert(await exchange.json(), UnloadRequest)
    if not body.lora_name:
        return await _refuse(exchange, 400, "InvalidUserInput", "'lora_name' needs to be provided to unload a LoRA.")
    try:
        await services.adapters.unload(body.lora_name, exchange.tenant)
    except AdapterNotFound:
        return await _refuse(exchange, 404, "NotFoundError", f"The lora adapter '{body.lora_name}' cannot be found.")
    await _say(exchange, f"Success: LoRA adapter '{body.lora_name}' removed successfully.")


def _in_vllms_words(reason: str) -> str:
    """The engine's reason, with what vLLM's clients look for in it."""
    if found := RANK.search(reason):
        return f"LoRA rank {found[2]} is greater than max_lora_rank {found[1]}."
    if found := INITIALISED.search(reason):
        return f"Adapters with init_lora_weights='{found[1]}' rewrite the base model's weights and are not supported."
    if "modules_to_save" in reason:
        return f"Unsupported modules_to_save: {reason}"
    return reason


async def _say(exchange: Exchange, text: str) -> None:
    await exchange.respond(Response(200, text.encode(), b"text/plain; charset=utf-8"))


async def _refuse(exchange: Exchange, status: int, kind: str, text: str) -> None:
    error = {"message": text, "type": kind, "param": None, "code": status}
    await exchange.respond(json_response({"error": error}, status))
