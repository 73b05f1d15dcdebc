"""An inference request, from HTTP or gRPC: named tensors in, named tensors out, as a whole or step by step."""

from __future__ import annotations

from contextlib import aclosing
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import msgspec

from inference.dialects.triton.model import find, output_names
from inference.dialects.triton.parameters import (
    STOP_AND_BAD_WORDS,
    Parameters,
    generation_request,
    parse_parameters,
    resolve_adapter,
)
from inference.dialects.triton.tensors import Tensor
from inference.errors import InvalidRequest
from inference.generation.embeddings import EmbeddingRequest
from inference.generation.requests import Prompt, TextPrompt, TokenPrompt
from inference.http.offload import in_thread_if

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

    from inference.generation.caller import Caller
    from inference.generation.deltas import Delta
    from inference.generation.generation import Generation
    from inference.services import Services
    from inference.workers.target import Target

INLINE_VALUES = 4096
STREAMED_INPUT = "When streaming, `exclude_input_in_output` = False is not allowed."
EMBEDDING_INPUTS = ("input_text", "text_input", "input")


@dataclass(slots=True)
class Inference:
    """A request. `outputs`: requested output names; empty for the default outputs."""

    model: str
    version: str
    request_id: str = ""
    parameters: dict[str, Any] = field(default_factory=dict)
    inputs: list[Tensor] = field(default_factory=list)
    outputs: list[str] = field(default_factory=list)


class Prepared:
    """A validated request and its output tensors."""

    def __init__(self, inference: Inference, parameters: Parameters, generation: Generation, prompt: str) -> None:
        self.inference, self.parameters, self.generation = inference, parameters, generation
        self._before = "" if parameters.flag("exclude_input_in_output", True) else prompt
        self._names = inference.outputs or ["output0" if isinstance(generation.request.prompt, TokenPrompt) else "text_output"]  # fmt: skip
        self._pieces = [_Piece() for _ in range(generation.request.n)]

    @property
    def streams(self) -> bool:
        """Whether the client wants every step."""
        return self.parameters.flag("stream")

    @property
    def version(self) -> str:
        """The model's version."""
        return str(self.generation.target.entry.version)

    def add(self, delta: Delta) -> None:
        """Add a delta to the complete response."""
        self._pieces[delta.index].add(delta)

    def whole(self) -> list[Tensor]:
        """The outputs of the complete response."""
        return self._tensors(self._pieces, self._before)

    def step(self, delta: Delta) -> list[Tensor]:
        """The outputs of one delta, without the prompt."""
        piece = _Piece()
        piece.add(delta)
        return self._tensors([piece], "")

    async def run(self) -> list[Tensor]:
        """Generate; returns the outputs of the complete response."""
        async with aclosing(self.generation.deltas()) as deltas:
            async for delta in deltas:
                self.add(delta)
        return self.whole()

    async def steps(self) -> AsyncGenerator[tuple[list[Tensor], bool], None]:
        """Generate; yields the outputs of every step, and whether it is the last."""
        left = self.generation.request.n
        async with aclosing(self.generation.deltas()) as deltas:
            async for delta in deltas:
                left -= delta.finish_reason is not None
                yield self.step(delta), left == 0

    def _tensors(self, pieces: list[_Piece], before: str) -> list[Tensor]:
        flag, usage = self.parameters.flag, self.generation.usage
        tensors = []
        for name in self._names:
            if name == "output0":
                ids = [token for piece in pieces for token in piece.ids]
                tensors.append(Tensor(name, "UINT32", [1, len(ids)], ids))
            else:
                tensors.append(Tensor(name, "BYTES", [len(pieces)], [before + piece.text for piece in pieces]))
        if flag("return_finish_reason"):
            # "None" before the end, as from vLLM's backend
            reasons = [str(piece.finish) for piece in pieces]
            tensors.append(Tensor("finish_reason", "BYTES", [len(pieces)], reasons))
        if flag("return_cumulative_logprob"):
            sums = [sum(token.logprob for token in piece.logprobs) for piece in pieces]
            tensors.append(Tensor("cumulative_logprob", "FP32", [len(pieces)], sums))
        if flag("return_logprobs"):
            texts = [msgspec.json.encode(self._logprobs(piece)).decode() for piece in pieces]
            tensors.append(Tensor("logprobs", "BYTES", [len(pieces)], texts))
        if flag("return_num_input_tokens"):
            tensors.append(Tensor("num_input_tokens", "UINT32", [1], [usage.prompt_tokens]))
        if flag("return_num_output_tokens"):
            counts = [len(piece.ids) for piece in pieces]
            tensors.append(Tensor("num_output_tokens", "UINT32", [len(pieces)], counts))
        return tensors

    def _logprobs(self, piece: _Piece) -> list[dict[str, Any]]:
        """One object for each token, in the format of Triton's vLLM backend."""
        tokenizer = self.generation.target.tokenizer
        return [
            {str(t.token_id): {"logprob": t.logprob, "rank": t.rank, "decoded_token": tokenizer.token_text(t.token_id)}}
            for t in piece.logprobs
        ]


class _Piece:
    """The output of one sequence."""

    def __init__(self) -> None:
        self.text = ""
        self.ids: list[int] = []
        self.finish: str | None = None
        self.logprobs: list[Any] = []

    def add(self, delta: Delta) -> None:
        self.text += delta.text
        self.ids += delta.token_ids
        self.logprobs += delta.logprobs or []
        self.finish = delta.finish_reason or self.finish


async def prepare(inference: Inference, services: Services, caller: Caller, *, stepwise: bool = False) -> Prepared:
    """Validate the request; nothing is sent to an engine.

    `stepwise`: the route answers every step unless the request says otherwise.
    """
    target = find(services.router, inference.model, inference.version)
    known = output_names(target)
    for name in inference.outputs:
        if name not in known:
            text = f"unexpected inference output '{name[:100]}' for model '{inference.model[:200]}'"
            raise InvalidRequest(text, "outputs")
    heavy = len(inference.parameters) + sum(len(tensor.values) for tensor in inference.inputs) > INLINE_VALUES
    prompt, given = _read(inference)
    parameters = await in_thread_if(heavy, parse_parameters, {**inference.parameters, **given}, services.limits)
    if parameters.flag("stream", stepwise) and not parameters.flag("exclude_input_in_output", True):
        raise InvalidRequest(STREAMED_INPUT, "exclude_input_in_output")
    with_logprobs = parameters.flag("return_logprobs") or parameters.flag("return_cumulative_logprob")
    model = resolve_adapter(services.router, inference.model, target, parameters.lora_name)
    request = generation_request(parameters, model, prompt, target, with_logprobs)
    generation = await services.generator.prepare(request, caller, "triton")
    return Prepared(inference, parameters, generation, prompt.text if isinstance(prompt, TextPrompt) else "")


def embeds(inference: Inference, services: Services) -> Target | None:
    """The deployment, if it computes embeddings; else None."""
    target = find(services.router, inference.model, inference.version)
    return None if target.info.embedding is None else target


async def embed(inference: Inference, services: Services, caller: Caller) -> list[Tensor]:
    """The vectors of the texts of the one input."""
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


def _read(inference: Inference) -> tuple[Prompt, dict[str, Any]]:
    """The prompt, and the parameters that are tensors of one element."""
    prompts: list[Prompt] = []
    given: dict[str, Any] = {}
    for tensor in inference.inputs:
        if tensor.name == "text_input":
            if tensor.datatype != "BYTES" or len(tensor.values) != 1:
                raise InvalidRequest("text_input must have the datatype BYTES and one element", "inputs")
            prompts.append(TextPrompt(tensor.values[0]))
        elif tensor.name == "input0":
            if tensor.datatype not in ("UINT32", "INT32", "INT64") or len(tensor.shape) > 2:
                raise InvalidRequest("input0 must have the datatype UINT32 and the shape [n] or [1,n]", "inputs")
            if len(tensor.shape) == 2 and tensor.shape[0] != 1:
                raise InvalidRequest("input0 must have the shape [n] or [1,n]", "inputs")
            prompts.append(TokenPrompt(tensor.values))
        elif len(tensor.values) == 1:
            given[tensor.name] = tensor.values[0]
        elif tensor.name in STOP_AND_BAD_WORDS:
            given[tensor.name] = tensor.values
        else:
            raise InvalidRequest(f"unexpected inference input '{tensor.name[:100]}'", "inputs")
    if len(prompts) != 1:
        raise InvalidRequest("inputs must hold one of `text_input` and `input0`", "inputs")
    return prompts[0], given
