"""A request's parameters from any of their places: `parameters`, the top level, tensors of one element, or the JSON
text `sampling_parameters` of Triton's vLLM backend.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import msgspec

from inference.errors import InvalidRequest, ModelNotFound, NotServed
from inference.generation.requests import GenerationRequest, Prompt
from inference.http.validation import check_range
from inference.vendors.vllm_sampling import SamplingFields, check_sampling, sampling_overrides

if TYPE_CHECKING:
    from inference.services import Limits
    from inference.workers.router import EngineRouter
    from inference.workers.target import Target

DEFAULT_MAX_TOKENS = 20
MICROSECONDS = 1e-6
ALIASES = {"max_new_tokens": "max_tokens", "stop_words": "stop", "random_seed": "seed"}
STOP_AND_BAD_WORDS = ("stop", "stop_words", "bad_words")
FLAGS = (
    "stream", "watermark", "exclude_input_in_output", "details", "do_sample", "return_finish_reason", "return_cumulative_logprob",
    "return_logprobs", "return_num_input_tokens", "return_num_output_tokens",
)  # fmt: skip
SEQUENCES = ("sequence_id", "sequence_start", "sequence_end")


@dataclass(slots=True)
class Parameters:
    """The parameters of a request, besides its prompt."""

    sampling: SamplingFields
    flags: dict[str, bool]
    lora_name: str | None
    timeout_s: float | None

    def flag(self, name: str, default: bool = False) -> bool:
        """Whether a flag is set."""
        return self.flags.get(name, default)


def parse_parameters(given: dict[str, Any], limits: Limits) -> Parameters:
    """Parse and check; raises InvalidRequest or NotServed. Unknown names are ignored, as in Triton."""
    values = dict(given)
    text = values.pop("sampling_parameters", None)
    for name, value in values.items():
        if isinstance(value, dict):
            raise InvalidRequest(f"parameter '{name[:100]}' must not be an object", name[:100])
    if text is not None:
        values.update(_from_text(text))
    if any(values.get(name) for name in SEQUENCES):
        raise NotServed("sequence batching is not supported by this server", "sequence_id")
    for name in STOP_AND_BAD_WORDS:
        if isinstance(values.get(name), str | list):
            values[name] = _words(values[name])
    for alias, name in ALIASES.items():
        if values.get(alias) is not None and values.get(name) in (None, []):
            values[name] = values[alias]
    known = {name: values[name] for name in SamplingFields.__struct_fields__ if values.get(name) is not None}
    try:
        sampling = msgspec.convert(known, SamplingFields, strict=False)
    except msgspec.ValidationError as error:
        raise InvalidRequest(f"parameters: {error}", "parameters") from error
    check_sampling(sampling, limits)
    check_range("max_tokens", sampling.max_tokens, 1, 1 << 31)
    flags = {name: flag_of(name, values[name]) for name in FLAGS if values.get(name) is not None}
    lora_name = values.get("lora_name")
    if lora_name is not None and not isinstance(lora_name, str):
        raise InvalidRequest("lora_name must be a string", "lora_name")
    return Parameters(sampling, flags, lora_name, _timeout_s(values.get("timeout")))


def resolve_adapter(router: EngineRouter, name: str, target: Target, lora_name: str | None) -> str:
    """The name for the resolver, with the adapter; raises InvalidRequest for an unknown adapter."""
    if lora_name is None:
        return name
    wanted = f"{target.entry.name}:{lora_name}"
    try:
        router.resolve(wanted)
    except ModelNotFound as error:
        raise InvalidRequest(f"LoRA {lora_name[:100]} is not supported, we currently support "
                             f"{[adapter.name for adapter in target.entry.adapters]}", "lora_name") from error  # fmt: skip
    return wanted


def generation_request(
    parameters: Parameters, model: str, prompt: Prompt, target: Target, with_logprobs: bool
) -> GenerationRequest:
    """The GenerationRequest."""
    body = parameters.sampling
    overrides = sampling_overrides(body, target.tokenizer)
    if not parameters.flag("do_sample", True):
        overrides = replace(overrides, temperature=0.0)
    return GenerationRequest(
        model=model,
        prompt=prompt,
        sampling=replace(
            overrides,
            logprobs=0 if with_logprobs else None,
            watermark=parameters.flag("watermark") or None,
        ),
        max_tokens=DEFAULT_MAX_TOKENS if body.max_tokens is None else body.max_tokens,
        seed=body.engine_seed,
        n=body.n or 1,
        stop=body.stop_strings,
        include_stop=bool(body.include_stop_str_in_output),
        skip_special_tokens=body.skip_special_tokens is not False,
        timeout_s=parameters.timeout_s,
    )


def _from_text(text: Any) -> dict[str, Any]:
    try:
        value = msgspec.json.decode(text) if isinstance(text, str) else None
    except (msgspec.DecodeError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise InvalidRequest("sampling_parameters must be a JSON object, as text", "sampling_parameters")
    return value


def _words(value: Any) -> list[Any]:
    """A text is one word. Empty words are none: TensorRT-LLM's clients send "" where they have nothing to say."""
    return [word for word in ([value] if isinstance(value, str) else value) if word != ""]


def flag_of(name: str, value: Any) -> bool:
    """A boolean, as such, as text, or as the 0 and 1 of clients without booleans; raises InvalidRequest."""
    if isinstance(value, bool) or (isinstance(value, int) and value in (0, 1)):
        return bool(value)
    if isinstance(value, str) and value.lower() in ("true", "false"):
        return value.lower() == "true"
    raise InvalidRequest(f"{name} must be a boolean", name)


def _timeout_s(value: Any) -> float | None:
    """The timeout in seconds, from Triton's microseconds."""
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or value < 0:
        raise InvalidRequest("timeout must be a non-negative number of microseconds", "timeout")
    return value * MICROSECONDS if value else None
