"""Requests that are sent again after an instance lost them: the body with which a decode instance gives one back, and how a
prefill instance reads it. The input is replaced by numbers: the prompt's length, its tokens, and the tokens of the answer so far.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from inference.dialects.mindie.errors import ENQUEUE, MindieError
from inference.dialects.mindie.requests import MessageType
from inference.generation.requests import ChatPrompt, TokenPrompt

if TYPE_CHECKING:
    from inference.dialects.mindie.clocks import Clock
    from inference.dialects.mindie.requests import InferenceRequest

UNBUILDABLE = "Failed to generate infer request"
UNSUPPORTED = "Try to do recompute but it is not supported."
PLACEHOLDER = "-"
"""Stands for an input that is not sent again."""


@dataclass(frozen=True, slots=True)
class Begun:
    """A request with tokens, and its body with an ordinary input."""

    body: dict[str, Any]
    prompt: list[int]
    generated: list[int]

    def resumed(self, request: InferenceRequest) -> InferenceRequest:
        """The parsed body, with what it stands for."""
        if request.max_tokens is not None and len(self.generated) >= request.max_tokens:
            raise MindieError(424, UNBUILDABLE)
        check_generated(self.generated, request)
        prompt = TokenPrompt(self.prompt, chat=isinstance(request.prompt, ChatPrompt))
        return replace(request, prompt=prompt, generated=self.generated, truncate=None)


def check_generated(generated: list[int], request: InferenceRequest) -> None:
    """Refuse tokens of an earlier instance that the model does not have; raises MindieError."""
    if not all(0 <= token < request.target.info.vocab_size for token in generated):
        raise MindieError(424, ENQUEUE + "Invalid Input Ids")


def unpack(body: dict[str, Any]) -> Begun | None:
    """What a body sent again stands for; None for one with an ordinary input. Raises MindieError."""
    original = body.get("origin_inputs")
    text = original if isinstance(original, str) and original else PLACEHOLDER
    conversation: Any = [{"role": "user", "content": PLACEHOLDER}]
    for key, stand_in in (("messages", conversation), ("prompt", text), ("inputs", text), ("text_input", text)):
        given = body.get(key)
        if isinstance(given, str):
            return Begun({**body, key: stand_in}, *_parts(_numbers(given)))
    inputs = body.get("inputs")
    if not isinstance(inputs, list) or len(inputs) != 1 or not isinstance(inputs[0], dict):
        return None
    data = inputs[0].get("data")
    if not isinstance(data, list) or not set(map(type, data)) <= {int}:
        raise MindieError(424, UNBUILDABLE)
    prompt, generated = _parts(data)
    return Begun({**body, "inputs": [{**inputs[0], "shape": [1, len(prompt)], "data": prompt}]}, prompt, generated)


def body_of(request: InferenceRequest, prompt: list[int], generated: list[int], clock: Clock) -> bytes | None:
    """The body with which the coordinator sends a request again; None where that is not supported."""
    form, kind = request.form, request.form.kind
    numbers = [len(prompt), *prompt, *generated]
    text = ",".join(map(str, numbers))
    if kind in (MessageType.TGI, MessageType.GENERAL_TGI):
        nested = _sampling(request) | _given(
            max_new_tokens=request.max_tokens,
            details=form.details,
            return_full_text=form.full_text,
            decoder_input_details=form.prefill,
            adapter_id=_adapter(request),
            stop=request.sampling.stop or None,
        )
        body: dict[str, Any] = {"inputs": text, "origin_inputs": form.text, "parameters": nested, "stream": form.stream}
    elif kind is MessageType.VLLM:
        body = {"prompt": text, "origin_inputs": form.text, **_sampling(request), **_limits(request)}
        body |= _given(model=_adapter(request))
    elif kind is MessageType.INFER:
        body = {"inputs": text, "stream": form.stream, "parameters": _nested(request)}
    elif kind is MessageType.TRITON:
        body = {"id": form.request_id, "text_input": text, "parameters": _nested(request)}
        body["parameters"] |= {"firstTokenCost": clock.first_ms, "decodeTime": clock.decodes}
    elif kind is MessageType.TRITON_TOKEN:
        tensor: dict[str, Any] = {"name": "input0", "shape": [1, len(numbers)], "datatype": "UINT32", "data": numbers}
        tensor["parameters"] = _nested(request)
        body = {"id": form.request_id, "inputs": [tensor], "outputs": [{"name": form.output}]}
    elif kind in (MessageType.OPENAI, MessageType.VLLM_OPENAI):
        body = {"model": form.model, "messages": text, **_sampling(request), **_limits(request)}
        body |= _given(tools=form.tools, tool_choice=form.choice, response_format=form.response_format)
    else:
        return None
    return json.dumps(body, ensure_ascii=False).encode()


def _parts(numbers: list[int]) -> tuple[list[int], list[int]]:
    if not numbers or not 1 <= numbers[0] < len(numbers):
        raise MindieError(424, UNBUILDABLE)
    return numbers[1 : 1 + numbers[0]], numbers[1 + numbers[0] :]


def _numbers(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError as error:
        raise MindieError(424, UNBUILDABLE) from error


def _given(**values: Any) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value is not None}


def _adapter(request: InferenceRequest) -> str | None:
    return None if request.target.adapter is None else request.target.adapter.name


def _sampling(request: InferenceRequest) -> dict[str, Any]:
    """What every dialect calls by the same name."""
    s = request.sampling
    # Some dialects read no `do_sample`: there a temperature says the same.
    named = s.temperature is not None or not s.sampled(1)
    return _given(
        temperature=s.temperature if named else 1.0,
        top_k=s.top_k,
        top_p=s.top_p,
        do_sample=s.do_sample,
        seed=s.seed,
        repetition_penalty=s.repetition_penalty,
        presence_penalty=s.presence_penalty,
        frequency_penalty=s.frequency_penalty,
    )


def _limits(request: InferenceRequest) -> dict[str, Any]:
    """The stop conditions of vLLM and OpenAI."""
    s = request.sampling
    return _given(
        stream=request.stream,
        max_tokens=request.max_tokens,
        stop=s.stop or None,
        stop_token_ids=s.stop_token_ids or None,
        include_stop_str_in_output=s.include_stop,
        skip_special_tokens=s.skip_special_tokens,
        ignore_eos=s.ignore_eos,
    )


def _nested(request: InferenceRequest) -> dict[str, Any]:
    """The `parameters` of native and Triton endpoints."""
    return _sampling(request) | _given(
        max_new_tokens=request.max_tokens,
        details=request.form.details,
        priority=request.priority,
        timeout=request.timeout_s,
    )
