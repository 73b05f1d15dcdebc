"""The request bodies of /v1/completions and /v1/chat/completions, and what they mean for the engine.

A field that this server knows but cannot serve is refused by name; fields that nobody knows are ignored, as OpenAI's
and vLLM's servers do. `null` is an absent value.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import msgspec

from inference.dialects.openai.prompts import PROMPT_FORMS
from inference.dialects.openai.structured import grammar_of
from inference.errors import InvalidRequest, NotServed
from inference.requests import GenerationRequest, Prompt
from inference.validation import check_count, check_range

if TYPE_CHECKING:
    from inference.services import Limits
    from inference.tokenizer import ModelTokenizer

INT64_MIN, INT64_MAX = -(1 << 63), (1 << 63) - 1
GREEDY_EPSILON = 1e-2
"""vLLM lifts temperatures between 0 and this to it, so that tiny ones do not overflow."""


class StreamOptions(msgspec.Struct):
    """`stream_options`."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class CommonRequest(msgspec.Struct):
    """The fields that both routes share. `priority` is accepted and ignored: no client goes before another."""

    model: str | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    typical_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    n: int | None = None
    max_tokens: int | None = None
    min_tokens: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    seed: int | None = None
    logit_bias: dict[str, float] | None = None
    allowed_token_ids: list[int] | None = None
    bad_words: list[str] | None = None
    prompt_logprobs: int | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: str | None = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None
    add_special_tokens: bool | None = None
    truncate_prompt_tokens: int | None = None
    truncation_side: str | None = None
    return_tokens_as_token_ids: bool | None = None
    return_token_ids: bool | None = None
    priority: int | None = None
    cache_salt: str | None = None
    echo: bool | None = None
    response_format: dict[str, Any] | None = None
    structured_outputs: dict[str, Any] | None = None
    guided_json: Any = None
    guided_regex: Any = None
    guided_choice: Any = None
    guided_grammar: Any = None
    use_beam_search: bool | None = None
    logprob_token_ids: list[int] | None = None
    kv_transfer_params: dict[str, Any] | None = None
    thinking_token_budget: int | None = None

    @property
    def include_usage(self) -> bool:
        """Whether a stream ends with a usage chunk."""
        return bool(self.stream_options and self.stream_options.include_usage)

    @property
    def continuous_usage(self) -> bool:
        """Whether every chunk carries the usage so far."""
        return bool(self.include_usage and self.stream_options and self.stream_options.continuous_usage_stats)

    @property
    def stop_strings(self) -> list[str]:
        """`stop` as a list."""
        return [self.stop] if isinstance(self.stop, str) else self.stop or []


class CompletionRequest(CommonRequest):
    """POST /v1/completions."""

    prompt: Annotated[Any, msgspec.Meta(extra_json_schema={"anyOf": PROMPT_FORMS})] = None
    prompt_embeds: Any = None
    suffix: str | None = None
    logprobs: int | None = None
    best_of: int | None = None


class ChatCompletionRequest(CommonRequest):
    """POST /v1/chat/completions."""

    messages: list[dict[str, Any]] | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    max_completion_tokens: int | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    include_reasoning: bool | None = None
    reasoning_effort: str | None = None
    functions: list[dict[str, Any]] | None = None
    function_call: Any = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    documents: list[dict[str, Any]] | None = None
    modalities: list[str] | None = None
    audio: dict[str, Any] | None = None


NOT_SERVED = (
    "use_beam_search", "logprob_token_ids", "kv_transfer_params", "thinking_token_budget", "prompt_embeds", "suffix", "functions",
    "function_call", "chat_template", "audio",
)  # fmt: skip


def check(body: CommonRequest, limits: Limits) -> None:
    """Everything that can be judged without the model; raises InvalidRequest or NotServed."""
    for name in NOT_SERVED:
        if getattr(body, name, None) not in (None, False, ""):
            raise NotServed(f"{name} is not supported by this server.", name)
    check_range("temperature", body.temperature, 0, 2)
    check_range("min_p", body.min_p, 0, 1)
    check_range("presence_penalty", body.presence_penalty, -2, 2)
    check_range("frequency_penalty", body.frequency_penalty, -2, 2)
    check_range("n", body.n, 1, limits.max_sequences)
    check_range("top_k", body.top_k, -1, 1 << 31)
    check_range("min_tokens", body.min_tokens, 0, 1 << 31)
    check_range("prompt_logprobs", body.prompt_logprobs, 0, limits.max_logprobs)
    if (
        body.truncate_prompt_tokens is not None
        and body.truncate_prompt_tokens != -1
        and body.truncate_prompt_tokens < 1
    ):
        raise InvalidRequest("truncate_prompt_tokens must be -1 or at least 1.", "truncate_prompt_tokens")
    for name in ("top_p", "typical_p"):
        value = getattr(body, name)
        if value is not None and not 0 < value <= 1:
            raise InvalidRequest(f"{name} must be in (0, 1], got {value}.", name)
    if body.repetition_penalty is not None and not 0 < body.repetition_penalty <= 100:
        raise InvalidRequest(
            f"repetition_penalty must be in (0, 100], got {body.repetition_penalty}.", "repetition_penalty"
        )
    if body.seed is not None and not INT64_MIN <= body.seed <= INT64_MAX:
        # The words in brackets are pydantic's, which vLLM's clients look for.
        rule = "greater_than_equal" if body.seed < INT64_MIN else "less_than_equal"
        raise InvalidRequest(f"seed must be between {INT64_MIN} and {INT64_MAX} ({rule}).", "seed")
    if body.truncation_side not in (None, "left", "right"):
        raise InvalidRequest("truncation_side must be 'left' or 'right'.", "truncation_side")
    if body.stream_options is not None and not body.stream:
        raise InvalidRequest("Stream options can only be defined when `stream=True`.", "stream_options")
    if body.stream and body.prompt_logprobs:
        raise InvalidRequest("prompt_logprobs are not available when `stream=True`.", "prompt_logprobs")
    check_count("stop", body.stop_strings, limits.max_stop_strings)
    for text in body.stop_strings:
        if not 0 < len(text) <= limits.max_stop_characters:
            raise InvalidRequest(f"stop: each string must have 1 to {limits.max_stop_characters} characters.", "stop")
    check_count("stop_token_ids", body.stop_token_ids, 128)
    check_count("bad_words", body.bad_words, 128)
    if any(not 0 < len(word.strip()) <= len(word) <= limits.max_stop_characters for word in body.bad_words or []):
        raise InvalidRequest(f"bad_words: each must have 1 to {limits.max_stop_characters} characters.", "bad_words")
    if body.allowed_token_ids is not None and not body.allowed_token_ids:
        raise InvalidRequest("allowed_token_ids must not be empty.", "allowed_token_ids")
    if body.cache_salt is not None and not 0 < len(body.cache_salt) <= 128:
        raise InvalidRequest("cache_salt must have 1 to 128 characters.", "cache_salt")
    _logit_bias(body)
    grammar_of(body)


def sampling(body: CommonRequest, logprobs: int | None, tokenizer: ModelTokenizer) -> dict[str, Any]:
    """The engine's sampling fields that the body sets."""
    fields: dict[str, Any] = {
        name: value
        for name in ("top_p", "min_p", "typical_p", "repetition_penalty", "presence_penalty", "frequency_penalty",
                     "min_tokens", "stop_token_ids", "ignore_eos", "allowed_token_ids", "prompt_logprobs")
        if (value := getattr(body, name)) is not None
    }  # fmt: skip
    if body.temperature is not None:
        fields["temperature"] = max(body.temperature, GREEDY_EPSILON) if body.temperature else 0.0
    if body.top_k is not None:
        fields["top_k"] = max(body.top_k, 0)
    if body.logit_bias:
        fields["logit_bias"] = _logit_bias(body)
    if body.bad_words:
        fields["bad_words"] = _bad_words(body.bad_words, tokenizer)
    if logprobs is not None:
        fields["logprobs"] = logprobs
    asked = grammar_of(body)
    if asked is not None:
        fields["grammar"] = asked[0]
    return fields


def generation_request(
    body: CommonRequest, prompt: Prompt, max_tokens: int | None, fields: dict[str, Any], max_model_len: int
) -> GenerationRequest:
    """The internal form of one prompt of this body; `fields` are those of `sampling`."""
    keep = body.truncate_prompt_tokens
    if keep is not None and keep > max_model_len:
        text = f"truncate_prompt_tokens must be at most {max_model_len}, the model's context, got {keep}."
        raise InvalidRequest(text, "truncate_prompt_tokens")
    if keep == -1:
        keep = max_model_len - 1
    right = body.truncation_side == "right"
    asked = grammar_of(body)
    return GenerationRequest(
        model=body.model,
        prompt=prompt,
        sampling=dict(fields),
        max_tokens=max_tokens,
        seed=None if body.seed == -1 else body.seed,
        n=body.n or 1,
        stop=body.stop_strings,
        include_stop=bool(body.include_stop_str_in_output),
        skip_special_tokens=body.skip_special_tokens is not False,
        truncate_left=None if right else keep,
        truncate_right=keep if right else None,
        cache_salt=body.cache_salt or "",
        grammar_field=None if asked is None else asked[1],
    )


def _logit_bias(body: CommonRequest) -> dict[int, float]:
    """Keys as ids, values clamped to -100..100 as vLLM does."""
    bias = body.logit_bias or {}
    if len(bias) > 300:
        raise InvalidRequest(f"logit_bias must have at most 300 entries, got {len(bias)}.", "logit_bias")
    if not all(key.isascii() and key.isdigit() and len(key) < 10 for key in bias):
        raise InvalidRequest("logit_bias: keys must be token ids.", "logit_bias")
    return {int(key): max(-100.0, min(100.0, value)) for key, value in bias.items()}


def _bad_words(words: list[str], tokenizer: ModelTokenizer) -> list[list[int]]:
    """Each word's ids at the start of a text and after a space."""
    sequences = []
    for word in words:
        for text in (word.lstrip(), " " + word.lstrip()):
            ids = tokenizer.fast.encode(text, add_special_tokens=False).ids
            if ids and ids not in sequences:
                sequences.append(ids)
    return sequences
