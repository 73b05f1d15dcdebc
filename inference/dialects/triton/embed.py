"""The vectors of embedding models, as tensors, or in the form of Triton's vLLM backend."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from inference.dialects.triton.infer import check
from inference.dialects.triton.model import EMBEDDING_OUTPUTS, find
from inference.dialects.triton.parameters import json_text, resolve_adapter
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
OUTPUTS = tuple(name for name, _, _ in EMBEDDING_OUTPUTS)
COUNTS = ("num_input_tokens", "num_output_tokens")
OUTPUTS_AS_VLLM = ("text_output", *COUNTS)


def embeds(inference: Inference, services: Services) -> Target | None:
    """The deployment, if it computes embeddings; else None."""
    target = find(services.router, inference.model, inference.version)
    return None if target.info.embedding is None else target


async def embed(inference: Inference, services: Services, caller: Caller) -> list[Tensor]:
    """The vectors of the texts of the one input; one vector as JSON text for an `embedding_request` of vLLM's backend. Only the
    outputs that the request names, if it names any. Raises a ServingError.
    """
    asked = [tensor for tensor in inference.inputs if tensor.name == EMBEDDING_REQUEST]
    check(inference, OUTPUTS_AS_VLLM if asked else OUTPUTS)
    model = _model(inference, services)
    if asked:
        tensors = await _embed_as_vllm(asked[0], inference, model, services, caller)
    else:
        tensors = [await _embed_texts(inference, model, services, caller)]
    return [tensor for tensor in tensors if not inference.outputs or tensor.name in inference.outputs]


def _model(inference: Inference, services: Services) -> str:
    """The name for the resolver, with the adapter that a parameter names; raises InvalidRequest for an unknown one."""
    named = [tensor.values for tensor in inference.inputs if tensor.name == "lora_name"]
    lora_name = named[0][0] if named and named[0] else inference.parameters.get("lora_name")
    if lora_name is not None and not isinstance(lora_name, str):
        raise InvalidRequest("lora_name must be a string", "lora_name")
    target = find(services.router, inference.model, inference.version)
    return resolve_adapter(services.router, inference.model, target, lora_name)


async def _embed_texts(inference: Inference, model: str, services: Services, caller: Caller) -> Tensor:
    """The vectors of the texts of the one input."""
    inputs = [tensor for tensor in inference.inputs if tensor.name in EMBEDDING_INPUTS]
    if len(inputs) != 1 or inputs[0].datatype != "BYTES" or not inputs[0].values:
        raise InvalidRequest("inputs must hold `input_text` of datatype BYTES with at least one element", "inputs")
    limit = services.limits.max_embedding_inputs
    if len(inputs[0].values) > limit:
        raise InvalidRequest(f"input_text must have at most {limit} elements", "inputs")
    prompts: list[Prompt] = [TextPrompt(text) for text in inputs[0].values]
    request = EmbeddingRequest(model=model, inputs=prompts)
    vectors = (await services.embedder.embed(request, caller, "triton")).vectors
    values = await in_thread_if(vectors.size > INLINE_VALUES, vectors.reshape(-1).tolist)
    return Tensor("embeddings", "FP32", list(vectors.shape), values)


async def _embed_as_vllm(
    asked: Tensor, inference: Inference, model: str, services: Services, caller: Caller
) -> list[Tensor]:
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
    request = EmbeddingRequest(model=model, inputs=[prompt], dimensions=dimensions)
    embeddings = await services.embedder.embed(request, caller, "triton")
    vector = msgspec.json.encode(embeddings.vectors[0].tolist()).decode()
    tensors = [Tensor("text_output", "BYTES", [1], [vector])]
    flags = {tensor.name: tensor.values for tensor in inference.inputs}
    for name, count in zip(COUNTS, (embeddings.prompt_tokens, 0), strict=True):
        if flags.get(f"return_{name}") == [True]:
            tensors.append(Tensor(name, "UINT32", [1], [count]))
    return tensors


def _prompt(value: Any) -> Prompt:
    if isinstance(value, str):
        return TextPrompt(value)
    if isinstance(value, list) and value and all(type(token) is int for token in value):
        return TokenPrompt(value)
    raise InvalidRequest(f"{EMBEDDING_REQUEST}: input must be a string or token ids", EMBEDDING_REQUEST)
