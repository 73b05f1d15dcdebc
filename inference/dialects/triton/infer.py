"""An inference request, from HTTP or gRPC: named tensors in, named tensors out, as a whole or step by step."""

from __future__ import annotations

from collections import Counter
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from inference.dialects.triton.model import find
from inference.dialects.triton.outputs import NAMES, Outputs
from inference.dialects.triton.parameters import (
    STOP_AND_BAD_WORDS,
    Parameters,
    check_given,
    generation_request,
    parse_parameters,
    resolve_adapter,
)
from inference.dialects.triton.statistics import settings_of
from inference.dialects.triton.tensors import Tensor
from inference.errors import InvalidRequest
from inference.generation.requests import TextPrompt, TokenPrompt
from inference.http.offload import in_thread_if

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Collection

    from inference.generation.caller import Caller
    from inference.generation.generation import Generation
    from inference.services import Services

INLINE_VALUES = 4096
STREAMED_INPUT = "Error generating stream: When streaming, `exclude_input_in_output` = False is not allowed."
TOKEN_INPUTS = ("input0", "input_ids")


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
    """A validated request and its outputs."""

    def __init__(self, inference: Inference, parameters: Parameters, generation: Generation, outputs: Outputs) -> None:
        self.inference, self.parameters, self.generation, self.outputs = inference, parameters, generation, outputs

    @property
    def streams(self) -> bool:
        """Whether the client wants every step."""
        return self.parameters.flag("stream")

    @property
    def version(self) -> str:
        """The model's version."""
        return str(self.generation.target.entry.version)

    async def run(self) -> list[Tensor]:
        """Generate; returns the outputs of the complete response."""
        async with aclosing(self.generation.deltas()) as deltas:
            async for delta in deltas:
                self.outputs.add(delta)
        return self.outputs.whole()

    async def steps(self) -> AsyncGenerator[tuple[list[Tensor], bool], None]:
        """Generate; yields the outputs of every step, and whether it is the last."""
        left = self.generation.request.n
        async with aclosing(self.generation.deltas()) as deltas:
            async for delta in deltas:
                left -= delta.finish_reason is not None
                yield self.outputs.step(delta), left == 0


def is_stop(inference: Inference) -> bool:
    """Whether this is TensorRT-LLM's signal, the tensor `stop` BOOL, to stop the request of the same id. Raises InvalidRequest for
    one without an id.
    """
    wanted = any(
        tensor.name == "stop" and tensor.datatype == "BOOL" and any(tensor.values) for tensor in inference.inputs
    )
    if wanted and not inference.request_id:
        raise InvalidRequest("stop needs the id of a request", "stop")
    return wanted


async def prepare(inference: Inference, services: Services, caller: Caller, *, stepwise: bool = False) -> Prepared:
    """Validate the request; nothing is sent to an engine.

    `stepwise`: the route answers every step unless the request says otherwise.
    """
    target = find(services.router, inference.model, inference.version)
    check(inference, NAMES)
    heavy = len(inference.parameters) + sum(len(tensor.values) for tensor in inference.inputs) > INLINE_VALUES
    name, prompt, given = _read(inference)
    parameters = await in_thread_if(heavy, parse_parameters, {**inference.parameters, **given}, services.limits)
    streams = parameters.flag("stream", stepwise)
    repeats = not parameters.flag(
        "exclude_input_in_output", streams or settings_of(services).triton_exclude_input_in_output
    )
    if (
        streams and parameters.beam_width is not None
    ):  # TensorRT-LLM's clients say false always; its streams have no prompt
        repeats = False
    if streams and repeats:
        raise InvalidRequest(STREAMED_INPUT, "exclude_input_in_output")
    model = resolve_adapter(services.router, inference.model, target, parameters.lora_name)
    request = generation_request(parameters, model, prompt, target)
    generation = await services.generator.prepare(request, caller, "triton")
    before = "" if not repeats else prompt.text if isinstance(prompt, TextPrompt) else list(prompt.token_ids)
    return Prepared(inference, parameters, generation, Outputs(generation, parameters, name, inference.outputs, before))


def check(inference: Inference, outputs: Collection[str]) -> None:
    """Raise InvalidRequest for what no request may have: reserved parameters, an output that is none of `outputs`, an input or
    output that is named twice.
    """
    check_given(inference.parameters)
    for kind, names in (("input", [tensor.name for tensor in inference.inputs]), ("output", inference.outputs)):
        twice = next((name for name, count in Counter(names).items() if count > 1), None)
        if twice is not None:
            raise InvalidRequest(f"{kind} '{twice[:100]}' already exists in request", f"{kind}s")
    unknown = next((name for name in inference.outputs if name not in outputs), None)
    if unknown is not None:
        text = f"unexpected inference output '{unknown[:100]}' for model '{inference.model[:200]}'"
        raise InvalidRequest(text, "outputs")


def _read(inference: Inference) -> tuple[str, TextPrompt | TokenPrompt, dict[str, Any]]:
    """The prompt with its tensor's name, and the parameters that are tensors of one element."""
    prompts: list[tuple[str, TextPrompt | TokenPrompt]] = []
    given: dict[str, Any] = {}
    for tensor in inference.inputs:
        if tensor.name == "text_input":
            if tensor.datatype != "BYTES" or len(tensor.values) != 1:
                raise InvalidRequest("text_input must have the datatype BYTES and one element", "inputs")
            prompts.append((tensor.name, TextPrompt(tensor.values[0])))
        elif tensor.name in TOKEN_INPUTS:
            prompts.append((tensor.name, TokenPrompt(_token_ids(tensor))))
        elif tensor.name == "stop" and tensor.datatype == "BOOL":
            if any(tensor.values):
                raise InvalidRequest(
                    "stop: only requests of ModelStreamInfer can be stopped, in the same stream", "stop"
                )
        elif len(tensor.values) == 1:
            given[tensor.name] = tensor.values[0]
        elif tensor.name in STOP_AND_BAD_WORDS:
            given[tensor.name] = tensor.values
        else:
            raise InvalidRequest(f"unexpected inference input '{tensor.name[:100]}'", "inputs")
    if len(prompts) != 1:
        raise InvalidRequest("inputs must hold one of `text_input`, `input0` and `input_ids`", "inputs")
    return *prompts[0], given


def _token_ids(tensor: Tensor) -> list[int]:
    if tensor.datatype not in ("UINT32", "INT32", "INT64") or len(tensor.shape) > 2:
        raise InvalidRequest(f"{tensor.name} must have the datatype UINT32 and the shape [n] or [1,n]", "inputs")
    if len(tensor.shape) == 2 and tensor.shape[0] != 1:
        raise InvalidRequest(f"{tensor.name} must have the shape [n] or [1,n]", "inputs")
    return tensor.values
