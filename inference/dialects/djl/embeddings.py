"""Inference with a deployment that makes embeddings: `inputs` to a list of vectors, as LMI's handler answers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from inference.dialects.djl.errors import PARSING, LmiError
from inference.dialects.djl.selection import reference, select
from inference.generation.embeddings import EmbeddingRequest
from inference.generation.requests import TextPrompt
from inference.http.exchange import json_response
from inference.http.offload import encoded, in_thread

if TYPE_CHECKING:
    from inference.http.exchange import Exchange
    from inference.services import Services
    from management.snapshot import DeploymentEntry


async def embed(exchange: Exchange, services: Services, entry: DeploymentEntry, body: dict[str, Any]) -> None:
    """A list with one vector for each input; `parameters.normalize` false leaves their lengths. Raises LmiError, ModelNotFound,
    and InvalidRequest for an adapter.
    """
    inputs, parameters = body.get("inputs"), body.get("parameters") or {}
    texts = [inputs] if isinstance(inputs, str) else inputs
    limit = services.limits.max_embedding_inputs
    if not isinstance(texts, list) or not all(isinstance(text, str) and text for text in texts):
        raise LmiError(f"{PARSING}'inputs' must be a text or a list of texts, none of them empty.")
    if not 1 <= len(texts) <= limit:
        raise LmiError(f"{PARSING}'inputs' must have 1 to {limit} texts.")
    normalise = parameters.get("normalize", True) if isinstance(parameters, dict) else None
    if not isinstance(normalise, bool):
        raise LmiError(f"{PARSING}'parameters' must be an object, and its 'normalize' true or false.")
    adapter = next((name for name in select(exchange, entry, body, len(texts)) if name), "")
    with services.admission.permit(exchange.permit_holder):
        asked = EmbeddingRequest(
            model=reference(entry, adapter), inputs=[TextPrompt(text) for text in texts], normalise=normalise,
            truncate_left=None, truncate_right=None,
        )  # fmt: skip
        made = await exchange.unless_gone(services.embedder.embed(asked, exchange, "djl"))
        vectors = await in_thread(lambda: encoded((vector.tolist() for vector in made.vectors), 1))
        await exchange.respond(json_response(vectors))
