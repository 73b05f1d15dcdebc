"""The model and service queries of the service plane; they respond whether or not workers are healthy."""

from __future__ import annotations

import json
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

from inference.dialects.mindie.answer import body_of
from inference.dialects.mindie.errors import invalid, model_not_found
from inference.dialects.mindie.parameters import utf16_length
from inference.generation.requests import TextPrompt
from inference.http.exchange import Response, json_response
from inference.http.offload import in_thread
from inference.workers.listing import usable_models

if TYPE_CHECKING:
    from inference.dialects.mindie.settings import MindieSettings
    from inference.dialects.mindie.state import MindieState
    from inference.http.exchange import Exchange
    from inference.services import Services
    from management.snapshot import DeploymentEntry

OWNER = "MindIE Server"
VERSION = "1.0.0"
TENSOR = {"shape": [-1], "datatype": "UINT32"}
NOT_UTF16 = "Failed to check the input text.Can't convert string to UTF-16."


async def list_models(exchange: Exchange, services: Services, state: MindieState) -> None:
    """GET /v1/models: indented, with keys in alphabetical order, unlike all other pages."""
    data = []
    for target, adapters in usable_models(state.router):
        name = target.entry.name
        data.append(_card(name, "null", target.entry.model))
        data += [_card(shown, name, adapter.name) for shown, adapter in adapters.items()]
    text = json.dumps({"data": data, "object": "list"}, indent=4, sort_keys=True, ensure_ascii=False)
    await exchange.respond(Response(200, text.encode()))


def _card(name: str, parent: str, root: str) -> dict[str, Any]:
    """A model card; `root` is a registered name, never a path of the server."""
    return {"id": name, "object": "model", "owned_by": OWNER, "parent": parent, "root": root}


async def retrieve(exchange: Exchange, services: Services, state: MindieState) -> None:
    """GET /v1/models/{model}."""
    name = exchange.parameters["model"]
    for target, adapters in usable_models(state.router):
        created = target.entry.created
        if name in (target.entry.name, target.entry.model):
            return await exchange.respond(json_response(_one(name, created)))
        if name in adapters:
            return await exchange.respond(json_response({**_one(name, created), "parent": target.entry.name}))
    raise model_not_found(name)


def _one(name: str, created: int) -> dict[str, Any]:
    return {"id": name, "object": "model", "created": created, "owned_by": OWNER}


async def server(exchange: Exchange, services: Services, state: MindieState) -> None:
    """GET /v2."""
    capacity = state.capacity(state.router.resolve(None))
    extensions = {
        "max_iter_times": capacity.max_iter_times,
        "prefill_policy_type": state.settings.prefill_policy_type,
        "decode_policy_type": state.settings.decode_policy_type,
        "max_prefill_batch_size": capacity.max_prefill_batch_size,
        "max_prefill_tokens": capacity.max_prefill_tokens,
    }
    await exchange.respond(json_response({"name": OWNER, "version": VERSION, "extensions": extensions}))


async def metadata(exchange: Exchange, services: Services, state: MindieState) -> None:
    """GET /v2/models/{model}."""
    target = state.named(exchange.parameters["model"])
    value = {
        "name": target.entry.name,
        "platform": OWNER,
        "inputs": [{"name": "input0", **TENSOR}],
        "outputs": [{"name": "output0", **TENSOR}],
    }
    await exchange.respond(json_response(value))


async def config(exchange: Exchange, services: Services, state: MindieState) -> None:
    """GET /v2/models/{model}/config."""
    target, settings = state.named(exchange.parameters["model"]), state.settings
    value = {
        "model_name": target.entry.name,
        "input_datatype": "INT64",
        "output_datatype": "INT64",
        "max_seq_len": target.info.max_model_len,
        "npu_mem_size": settings.npu_mem_size or -1,
        "cpu_mem_size": settings.cpu_mem_size,
        "world_size": settings.world_size,
        "model_weight_path": _weights(target.entry, settings),
        "model_instance_type": "Standard",
    }
    await exchange.respond(json_response(value))


def _weights(entry: DeploymentEntry, settings: MindieSettings) -> str:
    """The last part of `modelWeightPath`, or of the name of a model that config.json does not have."""
    name, weights = settings.model_weights or ("", "")
    return weights if entry.name == name else entry.model.rsplit("/", 1)[-1]


async def tokenizer(exchange: Exchange, services: Services, state: MindieState) -> None:
    """POST /v1/tokenizer: the number of tokens of a text, and their texts; also while the server drains."""
    body = await body_of(exchange, state, "Req body converts to json fail.")
    text = body.get("inputs")
    if not isinstance(text, str) or not text:
        raise invalid("Inputs in request body is invalid.")
    length = await exchange.work(utf16_length, text)
    if length > state.settings.max_request_bytes:
        limit = state.settings.max_request_bytes
        raise invalid(f"Inputs data length in [0, {limit}], but the length of inputs is {length}")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise invalid(NOT_UTF16) from error
    model = state.router.resolve(None).tokenizer
    # A draining server still counts tokens.
    with nullcontext() if services.admission.draining else services.admission.permit(exchange.permit_holder):
        ids = await model.encode(TextPrompt(text))
        pieces = [] if body.get("do_decode") is False else await in_thread(model.pieces, ids)
    await exchange.respond(json_response({"token_number": len(ids), "tokens": pieces}))
