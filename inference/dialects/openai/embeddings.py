"""POST /v1/embeddings: texts or ids in, vectors out, as numbers or as base64."""

from __future__ import annotations

import base64
import time
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import numpy as np

from inference.chat.conversation import parse_messages, template_arguments
from inference.dialects.openai.prompts import PROMPT_FORMS, is_empty, parse_forms
from inference.dialects.openai.request_ids import name_request
from inference.dialects.openai.usage import usage
from inference.errors import InvalidRequest, NotServed
from inference.generation.embeddings import EmbeddingRequest
from inference.generation.requests import ChatPrompt, Prompt
from inference.http.exchange import json_response
from inference.http.offload import encoded, in_thread_if
from inference.http.validation import check_range, convert

if TYPE_CHECKING:
    from collections.abc import Callable

    from inference.http.exchange import Exchange
    from inference.services import Services

INLINE_NUMBERS = 1 << 14
DTYPES = ("float32", "float16", "bfloat16", "fp8_e4m3", "fp8_e5m2")
ENDIANNESS = {"native": "<", "little": "<", "big": ">"}
"""All supported machines are little-endian; the documentation says what "native" means."""


class EmbeddingsRequest(msgspec.Struct):
    """POST /v1/embeddings. `messages` instead of `input` are rendered by the chat template."""

    model: str | None = None
    input: Annotated[Any, msgspec.Meta(extra_json_schema={"anyOf": PROMPT_FORMS})] = None
    messages: list[dict[str, Any]] | None = None
    encoding_format: str | None = None
    dimensions: int | None = None
    user: str | None = None
    truncate_prompt_tokens: int | None = None
    truncation_side: str | None = None
    add_special_tokens: bool | None = None
    normalize: bool | None = None
    use_activation: bool | None = None
    priority: int | None = None
    request_id: str | None = None
    embed_dtype: str | None = None
    endianness: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None


async def create(exchange: Exchange, services: Services) -> None:
    """Handle POST /v1/embeddings."""
    with services.admission.permit(exchange.tenant):
        body = await exchange.work(convert, await exchange.json(), EmbeddingsRequest)
        name_request(exchange, body.request_id)
        write = _writer(body)
        inputs = await exchange.work(parse_inputs, body, services.limits.max_embedding_inputs)
        keep = body.truncate_prompt_tokens
        longest = services.router.resolve(body.model).info.max_model_len
        if keep is not None and not (keep == -1 or 1 <= keep <= longest):
            text = f"truncate_prompt_tokens must be -1 or between 1 and {longest}, got {keep}."
            raise InvalidRequest(text, "truncate_prompt_tokens")
        if body.truncation_side not in (None, "left", "right"):
            raise InvalidRequest("truncation_side must be 'left' or 'right'.", "truncation_side")
        keep = longest if keep == -1 else keep
        left = body.truncation_side == "left"
        check_range("dimensions", body.dimensions, 1, 1 << 20)
        request = EmbeddingRequest(
            model=body.model,
            inputs=inputs,
            dimensions=body.dimensions,
            normalise=body.normalize if body.use_activation is None else body.use_activation,
            truncate_left=keep if left else None,
            truncate_right=None if left else keep,
        )
        made = await exchange.unless_gone(services.embedder.embed(request, exchange, "openai"))
        answer = {
            "id": f"embd-{exchange.request_id}",
            "object": "list",
            "created": int(time.time()),
            "model": body.model or made.target.entry.name,
            "data": await in_thread_if(made.vectors.size > INLINE_NUMBERS, _data, made.vectors, write),
            "usage": usage(made.prompt_tokens, 0),
        }
        await exchange.respond(json_response(answer))


def _data(vectors: np.ndarray, write: Callable[[np.ndarray], Any]) -> msgspec.Raw:
    rows = enumerate(vectors)
    return encoded(({"index": i, "object": "embedding", "embedding": write(vector)} for i, vector in rows), 1)


def parse_inputs(body: EmbeddingsRequest, limit: int) -> list[Prompt]:
    """`input` in its four forms, or `messages`."""
    special = body.add_special_tokens is not False
    if body.messages is not None:
        if body.input is not None:
            raise InvalidRequest("Only one of `input` and `messages` can be given.", "messages")
        # The chat template writes the special tokens itself.
        return [ChatPrompt(parse_messages(body.messages), False, False, bool(body.add_special_tokens),
                           template_arguments(body.chat_template_kwargs))]  # fmt: skip
    if is_empty(body.input):
        raise InvalidRequest("input must be given, and no entry may be empty.", "input")
    return parse_forms(body.input, "input", limit, special)


def _writer(body: EmbeddingsRequest) -> Callable[[np.ndarray], Any]:
    """A function that encodes a vector for the response."""
    form, dtype = body.encoding_format or "float", body.embed_dtype or "float32"
    if form not in ("float", "base64"):
        raise InvalidRequest(f"encoding_format must be 'float' or 'base64', got {form[:40]!r}.", "encoding_format")
    if dtype not in DTYPES:
        raise InvalidRequest(f"embed_dtype must be one of {', '.join(DTYPES)}, got {dtype[:40]!r}.", "embed_dtype")
    order = ENDIANNESS.get(body.endianness or "native")
    if order is None:
        raise InvalidRequest("endianness must be 'native', 'big' or 'little'.", "endianness")
    if dtype.startswith("fp8"):
        raise NotServed(f"embed_dtype: {dtype} is not supported by this server.", "embed_dtype")
    if form == "float":
        return lambda vector: vector.tolist()

    def write(vector: np.ndarray) -> str:
        if dtype == "bfloat16":  # the upper half of a float32, rounded to nearest, ties to even
            bits = vector.view(np.uint32)
            raw = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(f"{order}u2")
        else:
            raw = vector.astype(f"{order}f{4 if dtype == 'float32' else 2}")
        return base64.b64encode(raw.tobytes()).decode()

    return write
