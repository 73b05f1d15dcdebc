"""Shared by MindIE's two OpenAI endpoints: parameters in their order, the model's name, usage, the sequences' frames."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from inference.dialects.mindie.errors import invalid
from inference.dialects.mindie.parameters import Sampling, sequences_of, stop_strings, stop_token_ids
from inference.errors import ModelNotFound
from inference.generation import structured

if TYPE_CHECKING:
    from inference.dialects.mindie.answer import Clock
    from inference.dialects.mindie.fields import Fields
    from inference.dialects.mindie.state import MindieState
    from inference.generation.generation import Generation
    from inference.generation.requests import GrammarRequest
    from inference.workers.target import Target

OPENAI_MAX_TEMPERATURE = 2.0
MAX_BEAM_TOKENS = 128


@dataclass(slots=True)
class OpenAiParameters:
    """A body's parameters."""

    target: Target
    model: str
    sampling: Sampling
    max_tokens: int | None
    sequences: int
    stream: bool
    beams: bool
    returned: int
    """The number of sequences in a completion: the best `n`, or all of `best_of` if `n` is absent."""


def parse_model(body: Fields, state: MindieState, unknown: str) -> tuple[Target, str]:
    """The deployment or adapter of `model`; `unknown` is the endpoint's error for an unknown name."""
    name = body.get("model")
    if name is None:
        raise invalid("Request contains not model or model null")
    if not isinstance(name, str):
        raise invalid("Request param model must be string")
    if not name:
        raise invalid("Request param model must be not empty")
    try:
        return state.router.resolve(name), name
    except ModelNotFound as error:
        raise invalid(unknown.format(name=name[:256])) from error


def parse_parameters(
    body: Fields, state: MindieState, target: Target, model: str, vllm: bool = True
) -> OpenAiParameters:
    """Parse everything but the input; `vllm` selects vLLM's ranges instead of OpenAI's."""
    sampling = Sampling(ignore_eos=bool(body.boolean("ignore_eos")))
    sampling.stop = stop_strings(body, longest=None if vllm else 1024)
    sampling.stop_token_ids = stop_token_ids(body)
    if sampling.stop or sampling.stop_token_ids:
        sampling.include_stop = bool(body.boolean("include_stop_str_in_output"))
    sampling.temperature = body.temperature() if vllm else body.temperature(OPENAI_MAX_TEMPERATURE)
    sampling.top_k = body.minus_one_top_k() if vllm else body.integer("top_k", 0)
    sampling.top_p = body.top_p(open_high=False)
    sampling.seed = body.seed()
    sampling.repetition_penalty = body.repetition_penalty(2.0)
    sampling.frequency_penalty = body.penalty("frequency_penalty")
    sampling.presence_penalty = body.penalty("presence_penalty")
    sampling.skip_special_tokens = body.boolean("skip_special_tokens") is not False
    best_of = body.unsigned("best_of", 1, 128)
    n = body.unsigned("n", 1, 8192)
    max_tokens = _max_tokens(body)
    stream = bool(body.boolean("stream"))
    beams = bool(body.boolean("use_beam_search"))
    if beams and state.settings.async_scheduling:
        raise invalid("use_beam_search is not supported by this endpoint")
    if beams and (max_tokens is None or max_tokens > MAX_BEAM_TOKENS):
        raise invalid(
            f"Please set the max_tokens to be not larger than {MAX_BEAM_TOKENS} when the use_beam_search is on."
        )
    if stream and best_of is not None and best_of != (n or 1):
        raise invalid(f"best_of must be equal to n in stream mode, but best_of is {best_of}, n is {n}.")
    capacity = state.capacity(target)
    sequences = sequences_of(
        n, best_of, sampling, state.settings, capacity.max_batch_size, capacity.max_prefill_batch_size, beams
    )
    return OpenAiParameters(target, model, sampling, max_tokens, sequences, stream, beams, n or sequences)


def response_format(body: Fields) -> GrammarRequest | None:
    """The grammar of `response_format`."""
    given = body.object("response_format").values
    kind = given.get("type", "text")
    if kind == "text":
        return None
    if kind == "json_object":
        return structured.json_object("response_format")
    wrapper = given.get("json_schema")
    if kind != "json_schema" or not isinstance(wrapper, dict):
        raise invalid("Parameter response_format type must be text, json_object or json_schema.")
    name = wrapper.get("name")
    if not isinstance(name, str) or not 1 <= len(name) <= 64:
        raise invalid("Parameter response_format json_schema name length must be in [1,64].")
    if wrapper.get("schema") is None:
        raise invalid("Not found schema.")
    return structured.json_schema(wrapper["schema"], "response_format")


def usage(
    generation: Generation, completion_tokens: int, clock: Clock, benchmark: bool, reasoning_tokens: int = 0
) -> dict[str, Any]:
    """`usage`, with each step's batch size and queue time if the benchmark client's mode is on."""
    counts = generation.usage
    value: dict[str, Any] = {
        "prompt_tokens": counts.prompt_tokens,
        "prompt_tokens_details": {"cached_tokens": counts.cached_tokens},
        "completion_tokens": completion_tokens,
        **({"completion_tokens_details": {"reasoning_tokens": reasoning_tokens}} if reasoning_tokens else {}),
        "total_tokens": counts.prompt_tokens + completion_tokens,
    }
    if benchmark:
        value["batch_size"], value["queue_wait_time"] = clock.batch_sizes, clock.waits_us
    return value


def _max_tokens(body: Fields) -> int | None:
    value = body.get("max_tokens")
    if value is not None and (isinstance(value, bool) or not isinstance(value, int)):
        raise invalid("Parameter max_tokens not number_integer")
    return body.integer("max_tokens", 1)
