"""GET /health, /ping, / and /info; POST /tokenize."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from inference.chat.conversation import parse_messages
from inference.dialects.tgi.errors import undeserialisable
from inference.dialects.tgi.schema import GenerateRequest, chat_prompt, parse
from inference.errors import InvalidRequest
from inference.http.exchange import Response, json_response
from inference.http.offload import encoded, in_thread, release_memory
from inference.http.validation import convert
from inference.workers.tokenizer import MUCH_TEXT

if TYPE_CHECKING:
    from tokenizers import Encoding

    from inference.http.exchange import Exchange
    from inference.services import Services


async def health(exchange: Exchange, services: Services) -> None:
    """200 with an empty body if any worker can take requests, else 503."""
    if services.router.ready and not services.admission.draining:
        await exchange.respond(Response(200, b"", b"text/plain; charset=utf-8"))
    else:
        await exchange.respond(json_response({"error": "unhealthy", "error_type": "healthcheck"}, 503))


async def info(exchange: Exchange, services: Services) -> None:
    """GET /info: the union of the fields of all router versions."""
    target = services.router.resolve(None)
    model, limits = target.info, services.limits
    await exchange.respond(
        json_response(
            {
                "model_id": target.entry.model,
                "model_sha": None,
                "model_dtype": model.dtype,
                "model_device_type": model.device,
                "model_pipeline_tag": "text-generation",
                "max_concurrent_requests": services.admission.max_concurrent_requests,
                "max_best_of": limits.max_best_of,
                "max_stop_sequences": limits.max_stop_sequences,
                "max_input_length": model.max_model_len - 1,
                "max_input_tokens": model.max_model_len - 1,
                "max_total_tokens": model.max_model_len,
                "max_batch_total_tokens": model.num_blocks * model.block_size,
                "max_batch_size": model.max_num_seqs,
                "validation_workers": 1,
                "max_client_batch_size": limits.max_prompts,
                "router": "text-generation-router",
                "version": services.version,
                "sha": None,
                "docker_label": None,
            }
        )
    )


class ChatRequest(msgspec.Struct):
    """POST /chat_tokenize: the fields of a chat request that the template uses."""

    messages: list[dict[str, Any]]
    model: str | None = None
    tools: list[dict[str, Any]] | None = None


async def chat_tokenize(exchange: Exchange, services: Services) -> None:
    """POST /chat_tokenize: the rendered conversation, and its tokens without additional special tokens."""
    try:
        request = await exchange.work(convert, await exchange.json(), ChatRequest)
    except InvalidRequest as error:
        raise undeserialisable(error) from error
    with services.admission.permit(exchange.permit_holder):
        tokenizer = services.router.resolve(request.model).tokenizer
        arguments = {"tools": request.tools} if request.tools else {}
        messages = await exchange.work(parse_messages, request.messages)
        text, encoding = await tokenizer.chat_encoding(chat_prompt(messages, arguments))
        tokens = await in_thread(_tokens, text, encoding)
        del encoding
        if len(text) > MUCH_TEXT:
            await in_thread(release_memory)
        answer = {"tokenize_response": tokens, "templated_text": text}
        await exchange.respond(await in_thread(json_response, answer))


async def tokenize(exchange: Exchange, services: Services) -> None:
    """POST /tokenize: the tokens of `inputs` with the byte range of each."""
    request: GenerateRequest = await exchange.work(parse, await exchange.json(), GenerateRequest)
    tokenizer = services.router.resolve(None).tokenizer
    with services.admission.permit(exchange.permit_holder):
        encoding = await tokenizer.encoding(request.inputs, add_special_tokens=True)
        tokens = await in_thread(_tokens, request.inputs, encoding)
        del encoding
        if len(request.inputs) > MUCH_TEXT:
            await in_thread(release_memory)
        await exchange.respond(await in_thread(json_response, tokens))


def _tokens(inputs: str, encoding: Encoding) -> msgspec.Raw:
    """The tokens; offsets count bytes, as in the router."""
    starts = [0]
    for character in inputs:
        starts.append(starts[-1] + len(character.encode()))
    # One range at a time: `offsets` computes all of them in a single call, which cannot be interrupted.
    ranges = (encoding.token_to_chars(i) or (0, 0) for i in range(len(encoding)))
    return encoded(
        {"id": token_id, "text": inputs[start:stop], "start": starts[start], "stop": starts[stop]}
        for token_id, (start, stop) in zip(encoding.ids, ranges, strict=True)
    )
