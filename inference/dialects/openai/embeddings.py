"""POST /v1/embeddings and /pooling: texts, ids or conversations in, vectors out."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Annotated, Any

import msgspec

from inference.chat.conversation import parse_messages, template_arguments
from inference.dialects.openai.prompts import PROMPT_FORMS, is_empty, parse_forms
from inference.dialects.openai.request_ids import name_request
from inference.dialects.openai.usage import usage
from inference.dialects.openai.vectors import VectorWriter
from inference.errors import InvalidRequest, NotServed
from inference.generation.embeddings import EmbeddingRequest
from inference.generation.requests import ChatPrompt, Prompt
from inference.http.exchange import json_response
from inference.http.offload import in_thread_if
from inference.http.validation import check_count, check_range, lenient

if TYPE_CHECKING:
    from inference.http.exchange import Exchange
    from inference.services import Services

INLINE_NUMBERS = 1 << 14
BOTH = "Cannot set both `continue_final_message` and `add_generation_prompt` to True."


class EmbeddingsRequest(msgspec.Struct):
    """POST /v1/embeddings. `messages`, one conversation or several, are rendered by the chat template; they may also stand in
    `input`. `priority` and `cache_salt` are accepted and ignored.
    """

    model: str | None = None
    input: Annotated[Any, msgspec.Meta(extra_json_schema={"anyOf": PROMPT_FORMS})] = None
    messages: list[Any] | None = None
    encoding_format: str | None = None
    dimensions: int | None = None
    user: str | None = None
    truncate_prompt_tokens: int | None = None
    truncation_side: str | None = None
    padding: str | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    normalize: bool | None = None
    use_activation: bool | None = None
    priority: int | None = None
    cache_salt: str | None = None
    request_id: str | None = None
    embed_dtype: str | None = None
    endianness: str | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class PoolingRequest(EmbeddingsRequest):
    """POST /pooling: the same, and the task, which is always to embed."""

    task: str | None = None


async def create(exchange: Exchange, services: Services) -> None:
    """Handle POST /v1/embeddings."""
    with services.admission.permit(exchange.permit_holder):
        body = await exchange.work(lenient, await exchange.json(), EmbeddingsRequest)
        await _answer(exchange, services, body, "embd", "embedding", "embedding")


async def pool(exchange: Exchange, services: Services) -> None:
    """Handle POST /pooling."""
    with services.admission.permit(exchange.permit_holder):
        body = await exchange.work(lenient, await exchange.json(), PoolingRequest)
        if body.task not in (None, "embed"):
            raise NotServed(f"Unsupported task: {body.task[:40]!r}; this server has 'embed' alone.", "task")
        await _answer(exchange, services, body, "pool", "pooling", "data")


async def _answer(
    exchange: Exchange, services: Services, body: EmbeddingsRequest, prefix: str, kind: str, key: str
) -> None:
    """Embed and respond; each vector is called `key` in an object `kind`."""
    name_request(exchange, body.request_id)
    writer = VectorWriter(body)
    request = await _parse(exchange, services, body)
    made = await exchange.unless_gone(services.embedder.embed(request, exchange, "openai"))
    facts = {
        "id": f"{prefix}-{exchange.request_id}",
        "created": int(time.time()),
        "model": body.model or made.target.entry.name,
    }
    heavy = made.vectors.size > INLINE_NUMBERS
    if writer.in_bytes:
        counts = {"prompt_tokens": made.prompt_tokens, "total_tokens": made.prompt_tokens}
        return await exchange.respond(
            await in_thread_if(heavy, writer.response, made.vectors, {**facts, "usage": counts})
        )
    rows = await in_thread_if(heavy, writer.rows, made.vectors, kind, key)
    await exchange.respond(
        json_response(
            {"id": facts["id"], "object": "list", **facts, "data": rows, "usage": usage(made.prompt_tokens, 0)}
        )
    )


async def _parse(exchange: Exchange, services: Services, body: EmbeddingsRequest) -> EmbeddingRequest:
    """The request; raises InvalidRequest or NotServed."""
    inputs = await exchange.work(parse_inputs, body, services.limits.max_embedding_inputs)
    keep = body.truncate_prompt_tokens
    longest = services.router.resolve(body.model).info.max_model_len
    if keep is not None and not (keep == -1 or 1 <= keep <= longest):
        text = f"truncate_prompt_tokens must be -1 or between 1 and {longest}, got {keep}."
        raise InvalidRequest(text, "truncate_prompt_tokens")
    if body.truncation_side not in (None, "left", "right"):
        raise InvalidRequest("truncation_side must be 'left' or 'right'.", "truncation_side")
    if body.padding not in (None, "max_length", "do_not_pad"):
        raise InvalidRequest("padding must be 'max_length' or 'do_not_pad'.", "padding")
    if body.padding == "max_length":
        raise NotServed("padding: only 'do_not_pad' is supported by this server.", "padding")
    check_range("dimensions", body.dimensions, 1, 1 << 20)
    keep = longest if keep == -1 else keep
    left = body.truncation_side == "left"
    return EmbeddingRequest(
        model=body.model,
        inputs=inputs,
        dimensions=body.dimensions,
        normalise=body.normalize if body.use_activation is None else body.use_activation,
        truncate_left=keep if left else None,
        truncate_right=None if left else keep,
        end_user=body.user or "",
    )


def parse_inputs(body: EmbeddingsRequest, limit: int) -> list[Prompt]:
    """`input` in its four forms, or the conversations; raises InvalidRequest."""
    if body.chat_template is not None:
        raise NotServed("chat_template is not supported by this server.", "chat_template")
    field, given = "messages", body.messages
    if given is None and _holds_conversations(body.input):
        field, given = "input", body.input
    elif given is not None and body.input is not None:
        raise InvalidRequest("Only one of `input` and `messages` can be given.", "messages")
    if given is None:
        if is_empty(body.input):
            raise InvalidRequest("input must be given, and no entry may be empty.", "input")
        return parse_forms(body.input, "input", limit, body.add_special_tokens is not False)
    if body.add_generation_prompt and body.continue_final_message:
        raise InvalidRequest(BOTH, "add_generation_prompt")
    conversations = given if given and all(isinstance(item, list) for item in given) else [given]
    if not all(isinstance(message, dict) for conversation in conversations for message in conversation):
        raise InvalidRequest(f"{field} must be a list of messages, or a list of such lists.", field)
    check_count(field, conversations, limit)
    return [_conversation(conversation, body) for conversation in conversations]


def _conversation(messages: list[dict[str, Any]], body: EmbeddingsRequest) -> ChatPrompt:
    return ChatPrompt(
        parse_messages(messages),
        add_generation_prompt=bool(body.add_generation_prompt),
        continue_final_message=bool(body.continue_final_message),
        add_special_tokens=bool(body.add_special_tokens),  # the chat template writes them itself
        template_arguments=template_arguments(body.chat_template_kwargs),
    )


def _holds_conversations(given: Any) -> bool:
    """Whether `input` is a list of messages or of conversations."""
    first = given[0] if isinstance(given, list) and given else None
    return isinstance(first, dict) or (isinstance(first, list) and bool(first) and isinstance(first[0], dict))
