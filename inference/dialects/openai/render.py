"""POST /v1/chat/completions/render and /v1/completions/render: what the engine would be asked, without asking it.

The answer has the form of vLLM's GenerateRequest: the prompt's tokens, and the sampling parameters after defaults.
"""

from __future__ import annotations

import secrets
from typing import TYPE_CHECKING, Any

from inference.dialects.openai import chat, completions
from inference.dialects.openai.schema import ChatCompletionRequest, CompletionRequest
from inference.errors import NotServed
from inference.http.exchange import json_response
from inference.http.offload import in_thread_if
from inference.http.validation import lenient

if TYPE_CHECKING:
    from engine.sampling.params import SamplingParams
    from inference.dialects.openai.schema import CommonRequest
    from inference.generation.requests import GenerationRequest
    from inference.http.exchange import Exchange
    from inference.services import Services

INLINE_IDS = 10_000
SHOWN = (
    "temperature", "top_k", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty",
    "logit_bias", "allowed_token_ids", "max_tokens", "min_tokens", "stop_token_ids", "ignore_eos", "logprobs",
    "prompt_logprobs",
)  # fmt: skip
"""Sampling parameters that have the same name and meaning in the engine and in vLLM."""


async def render_chat(exchange: Exchange, services: Services) -> None:
    """POST /v1/chat/completions/render."""
    with services.admission.permit(exchange.permit_holder):
        body = await exchange.work(lenient, await exchange.json(), ChatCompletionRequest)
        _check(body)
        request = await chat.parse(body, exchange, services)
        value = await _rendered("chatcmpl", body, request, services)
        await exchange.respond(await in_thread_if(len(value["token_ids"]) > INLINE_IDS, json_response, value))


async def render_completion(exchange: Exchange, services: Services) -> None:
    """POST /v1/completions/render: one object for each prompt."""
    with services.admission.permit(exchange.permit_holder):
        body = await exchange.work(lenient, await exchange.json(), CompletionRequest)
        _check(body)
        requests = await completions.parse(body, exchange, services)
        values = [await _rendered("cmpl", body, request, services) for request in requests]
        long = sum(len(value["token_ids"]) for value in values) > INLINE_IDS
        await exchange.respond(await in_thread_if(long, json_response, values))


def _check(body: CommonRequest) -> None:
    if body.use_beam_search:
        raise NotServed("Beam search is not supported by the render endpoint", "use_beam_search")


async def _rendered(prefix: str, body: CommonRequest, request: GenerationRequest, services: Services) -> dict[str, Any]:
    token_ids, params = await services.generator.render(request)
    return {
        "request_id": f"{prefix}-{secrets.token_hex(16)}",
        "token_ids": token_ids,
        "features": None,
        "sampling_params": _shown(body, request, params),
        "model": body.model,
        "stream": bool(body.stream),
        "stream_options": body.stream_options if body.stream else None,
        "cache_salt": body.cache_salt,
        "priority": body.priority or 0,
        "kv_transfer_params": None,
    }


def _shown(body: CommonRequest, request: GenerationRequest, params: SamplingParams) -> dict[str, Any]:
    """The sampling parameters by vLLM's names."""
    return {
        "n": request.n,
        **{name: getattr(params, name) for name in SHOWN},
        "seed": request.seed,
        "stop": request.stop,
        "bad_words": body.bad_words or [],
        "include_stop_str_in_output": request.include_stop,
        "skip_special_tokens": request.skip_special_tokens,
        "structured_outputs": body.structured_outputs,
    }
