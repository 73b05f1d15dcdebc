"""POST /embed, and POST / if the default deployment computes embeddings: as in Hugging Face's embedding server."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from inference.dialects.tgi.errors import invalid, undeserialisable
from inference.errors import InvalidRequest
from inference.generation.embeddings import EmbeddingRequest
from inference.generation.requests import TextPrompt
from inference.http.exchange import json_response
from inference.http.offload import encoded, in_thread
from inference.http.validation import convert

if TYPE_CHECKING:
    from inference.http.exchange import Exchange
    from inference.services import Services


class EmbedRequest(msgspec.Struct):
    """Texts to embed; vectors have length 1 unless `normalize` is false."""

    inputs: str | list[str]
    normalize: bool | None = None
    truncate: bool | None = None
    truncation_direction: str | None = None
    prompt_name: str | None = None


async def embed_texts(exchange: Exchange, services: Services) -> None:
    """POST /embed."""
    await embed(exchange, services, await exchange.json())


async def embed(exchange: Exchange, services: Services, value: dict[str, Any]) -> None:
    """A list with one vector for each text."""
    try:
        request = await exchange.work(convert, value, EmbedRequest)
    except InvalidRequest as error:
        raise undeserialisable(error) from error
    texts = [request.inputs] if isinstance(request.inputs, str) else request.inputs
    limit = services.limits.max_embedding_inputs
    if not 1 <= len(texts) <= limit or not all(texts):
        raise invalid(f"`inputs` must be 1 to {limit} texts, none of them empty", "inputs")
    if request.truncation_direction not in (None, "Left", "Right", "left", "right"):
        raise invalid("`truncation_direction` must be Left or Right", "truncation_direction")
    if request.prompt_name is not None:
        raise invalid("`prompt_name` is not supported: the model's own default prompt is used", "prompt_name")
    longest = services.router.resolve(None).info.max_model_len if request.truncate else None
    left = (request.truncation_direction or "").lower() == "left"
    with services.admission.permit(exchange.permit_holder):
        asked = EmbeddingRequest(
            model=None,
            inputs=[TextPrompt(text) for text in texts],
            normalise=request.normalize is not False,
            truncate_left=longest if left else None,
            truncate_right=None if left else longest,
        )
        made = await exchange.unless_gone(services.embedder.embed(asked, exchange, "tgi"))
        vectors = await in_thread(lambda: encoded((vector.tolist() for vector in made.vectors), 1))
        await exchange.respond(json_response(vectors))
