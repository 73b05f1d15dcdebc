"""Shared by MindIE's two OpenAI endpoints: parameters in their order, the model's name, usage, the sequences' frames."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any

from inference.dialects.mindie.errors import invalid
from inference.dialects.mindie.fields import INT32_MAX
from inference.dialects.mindie.parameters import (
    Sampling,
    include_stop,
    stop_strings,
    stop_token_ids,
)
from inference.dialects.mindie.sequences import Combination, check_batch, parse_best_of, parse_n
from inference.errors import ModelNotFound
from inference.generation import structured

if TYPE_CHECKING:
    from collections.abc import Callable

    from inference.dialects.mindie.clocks import Clock
    from inference.dialects.mindie.fields import Fields
    from inference.dialects.mindie.state import MindieState
    from inference.generation.generation import Generation
    from inference.generation.requests import GrammarRequest
    from inference.workers.target import Target

OPENAI_MAX_TEMPERATURE = 2.0
MAX_BEAM_TOKENS = 128
MAX_SCHEMA_NAME = 64
SCHEMA = "Parameter response_format.json_schema"
BUDGET = f"Parameter thinking_budget must be in [1,{INT32_MAX}], got {{}}"


class Row(Enum):
    """The endpoints that share these parameters: chats in the flavours of vLLM and of OpenAI, and completions."""

    CHAT, OPENAI_CHAT, COMPLETIONS = range(3)


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
    logprobs: int | None
    grammar: GrammarRequest | None
    response_format: dict[str, Any] | None
    """As the body has it, if the row reads it."""


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
    body: Fields,
    state: MindieState,
    target: Target,
    model: str,
    logprobs: Callable[[Fields], int | None],
    check: Callable[[Combination, bool], None],
    row: Row,
) -> OpenAiParameters:
    """Parse everything but the input, in MindIE's order; `row` selects the ranges.

    `logprobs` and `check` are the endpoint's own: its parameters of log-probabilities, and its rules for `n` and `best_of`
    (of a stream).
    """
    capacity, settings = state.capacity(target), state.settings
    vllm = row is not Row.OPENAI_CHAT
    sampling = Sampling(ignore_eos=bool(body.boolean("ignore_eos")))
    sampling.stop = stop_strings(body, limited=not vllm)
    if row is Row.COMPLETIONS:
        sampling.include_stop = include_stop(body)
    sampling.stop_token_ids = stop_token_ids(body)
    if row is not Row.COMPLETIONS:
        sampling.include_stop = include_stop(body)
    sampling.temperature = body.temperature() if vllm else body.temperature(OPENAI_MAX_TEMPERATURE)
    sampling.top_k = body.top_k(-1 if vllm else 0)
    sampling.top_p = body.top_p(open_high=False)
    sampling.seed = body.seed()
    if row is Row.CHAT:
        _check_thinking(body.object("chat_template_kwargs"))
    sampling.repetition_penalty = body.repetition_penalty(2.0)
    sampling.frequency_penalty = body.frequency_penalty()
    sampling.presence_penalty = body.presence_penalty()
    sampling.skip_special_tokens = body.boolean("skip_special_tokens") is not False
    best_of = parse_best_of(body)
    n = parse_n(body, settings, capacity)
    beams = bool(body.boolean("use_beam_search"))
    wanted_logprobs = logprobs(body)
    max_tokens = body.max_tokens()
    stream = bool(body.boolean("stream"))
    grammar = response_format(body) if vllm else None
    combination = Combination(n, best_of, sampling.temperature)
    if not beams:
        check(combination, stream)
    elif (max_tokens or capacity.max_iter_times) > MAX_BEAM_TOKENS:
        raise invalid(
            f"Please set the max_tokens to be not larger than {MAX_BEAM_TOKENS} when the use_beam_search is on."
        )
    combination.check_scheduling(settings, beams)
    sequences = combination.wanted
    check_batch("best_of", sequences, settings, capacity)
    return OpenAiParameters(
        target,
        model,
        sampling,
        max_tokens,
        sequences,
        stream,
        beams,
        n or sequences,
        wanted_logprobs,
        grammar,
        body.get("response_format") if vllm else None,
    )


def _check_thinking(given: Fields) -> None:
    """A budget has an effect only while the model reasons, and is refused then."""
    budget = given.integer("thinking_budget", 1, refusal=BUDGET)
    if budget is not None and given.boolean("enable_thinking"):
        raise invalid("thinking_budget is not supported by this endpoint")


def response_format(body: Fields) -> GrammarRequest | None:
    """The grammar of `response_format`."""
    given = body.get("response_format")
    if given is None:
        return None
    if not isinstance(given, dict):
        raise invalid("Parameter response_format must be an object")
    kind = given.get("type")
    if kind is None:
        raise invalid("Parameter response_format must contain 'type' field")
    if not isinstance(kind, str):
        raise invalid("Parameter response_format.type must be a string")
    if kind == "text":
        return None
    if kind == "json_object":
        return structured.json_object("response_format")
    if kind != "json_schema":
        raise invalid(
            f"Parameter response_format.type must be 'json_object', 'json_schema' or 'text', got '{kind[:256]}'"
        )  # fmt: skip
    return structured.json_schema(_schema(given), "response_format")


def _schema(given: dict[str, Any]) -> dict[str, Any]:
    wrapper = _object(given, "json_schema", ".json_schema")
    name = wrapper.get("name")
    if name is None:
        raise invalid(f"{SCHEMA}.name is required")
    if not isinstance(name, str):
        raise invalid(f"{SCHEMA}.name must be a string")
    if not 1 <= len(name.encode("utf-8", "surrogatepass")) <= MAX_SCHEMA_NAME:
        raise invalid(f"{SCHEMA}.name must be 1-{MAX_SCHEMA_NAME} characters")
    return _object(wrapper, "schema", ".json_schema.schema")


def _object(values: dict[str, Any], key: str, path: str) -> dict[str, Any]:
    value = values.get(key)
    if value is None:
        raise invalid(f"Parameter response_format{path} is required when type is 'json_schema'")
    if not isinstance(value, dict):
        raise invalid(f"Parameter response_format{path} must be an object")
    return value


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
