"""A request's parameters from any of their places: `parameters`, the top level, tensors of one element, or the JSON
text `sampling_parameters` of Triton's vLLM backend.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from inference.dialects.triton.guides import grammar_of
from inference.errors import InvalidRequest, ModelNotFound, NotServed
from inference.generation.beam_search import check_beams
from inference.generation.requests import GenerationRequest, GrammarRequest, Prompt
from inference.http.validation import check_range, convert
from inference.vendors.vllm_sampling import SamplingFields, check_sampling, sampling_overrides

if TYPE_CHECKING:
    from inference.services import Limits
    from inference.workers.router import EngineRouter
    from inference.workers.target import Target

Fields = TypeVar("Fields", bound=msgspec.Struct)
DEFAULT_MAX_TOKENS = 20
MICROSECONDS = 1e-6
MAX_TIMEOUT_US = (1 << 64) - 1
"""Triton keeps a timeout in 64 bits."""
ALIASES = {
    "max_new_tokens": "max_tokens", "request_output_len": "max_tokens", "stop_words": "stop", "random_seed": "seed",
    "num_return_sequences": "n", "min_length": "min_tokens", "runtime_top_k": "top_k", "streaming": "stream",
}  # fmt: skip
"""Other names of a parameter: those of MindIE, and of TensorRT-LLM's backend."""
PREFIX = "sampling_param_"
"""What TensorRT-LLM's LLM API backend puts before the name of a sampling parameter."""
STOP_AND_BAD_WORDS = ("stop", "stop_words", "bad_words")
FLAGS = (
    "stream", "watermark", "exclude_input_in_output", "details", "do_sample", "return_finish_reason", "return_cumulative_logprob",
    "return_logprobs", "return_num_input_tokens", "return_num_output_tokens", "return_log_probs",
)  # fmt: skip
WITH_LOGPROBS = ("details", "return_logprobs", "return_cumulative_logprob", "return_log_probs")
LOGITS = ("return_context_logits", "return_generation_logits")
NOT_SERVED = ("lora_task_id", "embedding_bias_words", "embedding_bias_weights")
"""What changes an answer of TensorRT-LLM's, so that it is not ignored as other unknown names are."""
SAMPLING_TEXT = "sampling_parameters"
RESERVED = "triton_"
RESERVED_PARAMETER = "parameter keys starting with 'triton_' are reserved for Triton usage and should not be specified."
INVALID_TYPE = "parameter '{}' has invalid type. It should be either 'int', 'bool', or 'string'."
SEQUENCES = ("sequence_id", "sequence_start", "sequence_end")


@dataclass(slots=True)
class Parameters:
    """The parameters of a request, besides its prompt."""

    sampling: SamplingFields
    flags: dict[str, bool]
    lora_name: str | None
    timeout_s: float | None
    logprobs: int | None = None
    """How many of the likeliest tokens `logprobs` has, besides the token itself; None: it is null."""
    grammar: GrammarRequest | None = None
    beam_width: int | None = None
    length_penalty: float = 1.0

    def flag(self, name: str, default: bool = False) -> bool:
        """Whether a flag is set."""
        return self.flags.get(name, default)


def check_given(given: dict[str, Any]) -> None:
    """Raise InvalidRequest for a name that only Triton itself may use, and for an object in place of a value."""
    for name, value in given.items():
        if name.startswith(RESERVED):
            raise InvalidRequest(RESERVED_PARAMETER, name[:100])
        if isinstance(value, dict) and name != SAMPLING_TEXT:
            raise InvalidRequest(INVALID_TYPE.format(name[:100]), name[:100])


def parse_parameters(given: dict[str, Any], limits: Limits) -> Parameters:
    """Parse and check, after `check_given`; raises InvalidRequest or NotServed. Unknown names are ignored, as in Triton."""
    values = dict(given)
    text = values.pop(SAMPLING_TEXT, None)
    if text is not None:
        values.update(json_text(text, SAMPLING_TEXT))
    sequence = next((name for name in SEQUENCES if values.get(name)), None)
    if sequence is not None:
        raise NotServed(f"{sequence}: sequence batching is not supported by this server", sequence)
    for name in LOGITS:
        if values.get(name) is not None and flag_of(name, values[name]):
            raise NotServed(f"{name} is not supported by this server", name)
    refused = next((name for name in NOT_SERVED if values.get(name) is not None), None)
    if refused is not None:
        raise NotServed(f"{refused} is not supported by this server", refused)
    given_as = _rename(values)
    try:
        sampling, others = _numbers(values, limits)
    except InvalidRequest as error:
        if error.field not in given_as:
            raise
        name = given_as[error.field]
        raise InvalidRequest(error.message.replace(error.field, name, 1), name) from error
    flags = {name: flag_of(given_as.get(name, name), values[name]) for name in FLAGS if values.get(name) is not None}
    return Parameters(
        sampling,
        flags,
        others.lora_name,
        _timeout_s(values.get("timeout")),
        others.logprobs,
        grammar_of(values),
        others.beam_width,
        1.0 if others.len_penalty is None else others.len_penalty,
    )


class OtherFields(msgspec.Struct):
    """The parameters that are not vLLM's sampling fields."""

    logprobs: int | None = None
    lora_name: str | None = None
    beam_width: int | None = None
    len_penalty: float | None = None


def _rename(values: dict[str, Any]) -> dict[str, str]:
    """Give every parameter the name that it has here; the given name counts if both are there. Returns the client's names
    by those.
    """
    given_as: dict[str, str] = {}
    for prefixed in [name for name in values if name.startswith(PREFIX)]:
        name, value = prefixed.removeprefix(PREFIX), values.pop(prefixed)
        if name not in values:
            values[name], given_as[name] = value, prefixed
    for name in STOP_AND_BAD_WORDS:
        if isinstance(values.get(name), str | list):
            values[name] = _words(values[name])
    for alias, name in ALIASES.items():
        if values.get(alias) is not None and values.get(name) in (None, []):
            values[name], given_as[name] = values[alias], alias
    if values.get("top_p") == 0 and values.get("beam_width") is not None:  # TensorRT-LLM's, where 0 is none
        del values["top_p"]
    if values.get("top_p") is None and values.get("runtime_top_p"):
        values["top_p"], given_as["top_p"] = values["runtime_top_p"], "runtime_top_p"
    return given_as


def _numbers(values: dict[str, Any], limits: Limits) -> tuple[SamplingFields, OtherFields]:
    """The parameters with types and ranges; raises InvalidRequest."""
    sampling, others = _converted(values, SamplingFields), _converted(values, OtherFields)
    check_sampling(sampling, limits)
    check_range("max_tokens", sampling.max_tokens, 1, 1 << 31)
    check_range("logprobs", others.logprobs, 0, limits.max_logprobs)
    check_range("beam_width", others.beam_width, 1, limits.max_sequences)
    check_range("len_penalty", others.len_penalty, -10, 10)
    return sampling, others


def _converted(values: dict[str, Any], kind: type[Fields]) -> Fields:
    known = {name: values[name] for name in kind.__struct_fields__ if values.get(name) is not None}
    return convert(known, kind, strict=False)


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


def generation_request(parameters: Parameters, model: str, prompt: Prompt, target: Target) -> GenerationRequest:
    """The GenerationRequest; raises InvalidRequest for parameters that a beam search cannot have."""
    body = parameters.sampling
    overrides = sampling_overrides(body, target.tokenizer)
    if not parameters.flag("do_sample", True):
        overrides = replace(overrides, temperature=0.0)
    wants = any(parameters.flag(name) for name in WITH_LOGPROBS)
    beams = (parameters.beam_width or 1) > 1
    request = GenerationRequest(
        model=model,
        prompt=prompt,
        sampling=replace(
            overrides,
            logprobs=(parameters.logprobs or 0) if wants else None,
            watermark=parameters.flag("watermark") or None,
        ),
        grammar=parameters.grammar,
        max_tokens=DEFAULT_MAX_TOKENS if body.max_tokens is None else body.max_tokens,
        seed=body.engine_seed,
        n=(parameters.beam_width if beams else body.n) or 1,
        beams=beams,
        length_penalty=parameters.length_penalty,
        stop=body.stop_strings,
        include_stop=bool(body.include_stop_str_in_output),
        skip_special_tokens=body.skip_special_tokens is not False,
        timeout_s=parameters.timeout_s,
    )
    if beams:
        check_beams(request)
    return request


def json_text(text: Any, field: str) -> dict[str, Any]:
    """The object of a JSON text; raises InvalidRequest."""
    try:
        value = msgspec.json.decode(text) if isinstance(text, str) else None
    except (msgspec.DecodeError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise InvalidRequest(f"{field} must be a JSON object, as text", field)
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
    """The timeout in seconds, from Triton's microseconds; None for 0. Raises InvalidRequest."""
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= MAX_TIMEOUT_US:  # nor NaN
        raise InvalidRequest(f"timeout must be a number of microseconds from 0 to {MAX_TIMEOUT_US}", "timeout")
    return value * MICROSECONDS if value else None
