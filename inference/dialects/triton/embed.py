"""The vectors of embedding models, as tensors, or in the form of Triton's vLLM backend."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from inference.dialects.triton.model import find
from inference.dialects.triton.parameters import json_text
from inference.dialects.triton.tensors import Tensor
from inference.errors import InvalidRequest
from inference.generation.embeddings import EmbeddingRequest
from inference.generation.requests import Prompt, TextPrompt, TokenPrompt
from inference.http.offload import in_thread_if

if TYPE_CHECKING:
    from inference.dialects.triton.infer import Inference
    from inference.generation.caller import Caller
    from inference.services import Services
    from inference.workers.target import Target

INLINE_VALUES = 4096
EMBEDDING_REQUEST = "embedding_request"
EMBEDDING_INPUTS = ("input_text", "text_input", "input")


def embeds(inference: Inference, services: Services) -> Target | None:
    """The deployment, if it computes embeddings; else None."""
    target = find(services.router, inference.model, inference.version)
    return None if target.info.embedding is None else target


async def embed(inference: Inference, services: Services, caller: Caller) -> list[Tensor]:
    """The vectors of the texts of the one input; one vector as JSON text for an `embedding_request` of vLLM's backend."""
    asked = [tensor for tensor in inference.inputs if tensor.name == EMBEDDING_REQUEST]
    if asked:
        return await _embed_as_vllm(asked[0], inference, services, caller)
    inputs = [tensor for tensor in inference.inputs if tensor.name in EMBEDDING_INPUTS]
    if len(inputs) != 1 or inputs[0].datatype != "BYTES" or not inputs[0].values:
        raise InvalidRequest("inputs must hold `input_text` of datatype BYTES with at least one element", "inputs")
    limit = services.limits.max_embedding_inputs
    if len(inputs[0].values) > limit:
        raise InvalidRequest(f"input_text must have at most {limit} elements", "inputs")
    prompts: list[Prompt] = [TextPrompt(text) for text in inputs[0].values]
    request = EmbeddingRequest(model=inference.model, inputs=prompts)
    vectors = (await services.embedder.embed(request, caller, "triton")).vectors
    values = await in_thread_if(vectors.size > INLINE_VALUES, vectors.reshape(-1).tolist)
    return [Tensor("embeddings", "FP32", list(vectors.shape), values)]


async def _embed_as_vllm(asked: Tensor, inference: Inference, services: Services, caller: Caller) -> list[Tensor]:
    """`text_output` with the vector as JSON; `input` is a text or token ids, `pooling_params.dimensions` their number."""
    if asked.datatype != "BYTES" or len(asked.values) != 1:
        raise InvalidRequest(f"{EMBEDDING_REQUEST} must have the datatype BYTES and one element", "inputs")
    body = json_text(asked.values[0], EMBEDDING_REQUEST)
    prompt, pooling = _prompt(body.get("input")), body.get("pooling_params") or {}
    dimensions = pooling.get("dimensions") if isinstance(pooling, dict) else pooling
    if isinstance(dimensions, list) and len(dimensions) == 1:  # vLLM's backend reads the first of a list
        dimensions = dimensions[0]
    if not isinstance(pooling, dict) or not (dimensions is None or type(dimensions) is int):
        raise InvalidRequest(f"{EMBEDDING_REQUEST}: pooling_params.dimensions must be an integer", EMBEDDING_REQUEST)
    request = EmbeddingRequest(model=inference.model, inputs=[prompt], dimensions=dimensions)
    embeddings = await services.embedder.embed(request, caller, "triton")
    vector = msgspec.json.encode(embeddings.vectors[0].tolist()).decode()
    tensors = [Tensor("text_output", "BYTES", [1], [vector])]
    flags = {tensor.name: tensor.values for tensor in inference.inputs}
    counts = {"num_input_tokens": embeddings.prompt_tokens, "num_output_tokens": 0}
    for name, count in counts.items():
        if flags.get(f"return_{name}") == [True]:
            tensors.append(Tensor(name, "UINT32", [1], [count]))
    return tensors


def _prompt(value: Any) -> Prompt:
    if isinstance(value, str):
        return TextPrompt(value)
    if isinstance(value, list) and value and all(type(token) is int for token in value):
        return TokenPrompt(value)
    raise InvalidRequest(f"{EMBEDDING_REQUEST}: input must be a string or token ids", EMBEDDING_REQUEST)
