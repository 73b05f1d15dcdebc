"""vLLM's sampling fields, shared by its OpenAI routes and /generate.

`null` is an absent value. Values that a request leaves out come from the model's generation_config.json.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import msgspec

from inference.errors import InvalidRequest
from inference.generation.requests import SamplingOverrides
from inference.http.validation import check_count, check_range

if TYPE_CHECKING:
    from inference.services import Limits
    from inference.workers.tokenizer import ModelTokenizer

INT64_MIN, INT64_MAX = -(1 << 63), (1 << 63) - 1
LEAST_TEMPERATURE = 1e-2
"""Temperatures between 0 and this are raised to it, as in vLLM, to avoid overflow."""


class SamplingFields(msgspec.Struct):
    """The fields of vLLM's SamplingParams that a client may set."""

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
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None

    @property
    def stop_strings(self) -> list[str]:
        """`stop` as a list."""
        return [self.stop] if isinstance(self.stop, str) else self.stop or []

    @property
    def engine_seed(self) -> int | None:
        """The seed; None for -1, which means no seed."""
        return None if self.seed == -1 else self.seed


def check_sampling(body: SamplingFields, limits: Limits) -> None:
    """Checks that need no model; raises InvalidRequest."""
    check_range("temperature", body.temperature, 0, 2)
    check_range("min_p", body.min_p, 0, 1)
    check_range("presence_penalty", body.presence_penalty, -2, 2)
    check_range("frequency_penalty", body.frequency_penalty, -2, 2)
    check_range("n", body.n, 1, limits.max_sequences)
    check_range("top_k", body.top_k, -1, 1 << 31)
    check_range("min_tokens", body.min_tokens, 0, 1 << 31)
    check_range("prompt_logprobs", body.prompt_logprobs, 0, limits.max_logprobs)
    for name in ("top_p", "typical_p"):
        value = getattr(body, name)
        if value is not None and not 0 < value <= 1:
            raise InvalidRequest(f"{name} must be in (0, 1], got {value}.", name)
    if body.repetition_penalty is not None and not 0 < body.repetition_penalty <= 100:
        raise InvalidRequest(
            f"repetition_penalty must be in (0, 100], got {body.repetition_penalty}.", "repetition_penalty"
        )
    if body.seed is not None and not INT64_MIN <= body.seed <= INT64_MAX:
        # The words in brackets are pydantic's error types, which vLLM's clients search for.
        rule = "greater_than_equal" if body.seed < INT64_MIN else "less_than_equal"
        raise InvalidRequest(f"seed must be between {INT64_MIN} and {INT64_MAX} ({rule}).", "seed")
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
    logit_bias(body)


def sampling_overrides(body: SamplingFields, tokenizer: ModelTokenizer) -> SamplingOverrides:
    """The sampling parameters that the body sets."""
    temperature = body.temperature
    if temperature:
        temperature = max(temperature, LEAST_TEMPERATURE)
    return SamplingOverrides(
        temperature=temperature,
        top_k=None if body.top_k is None else max(body.top_k, 0),
        top_p=body.top_p,
        min_p=body.min_p,
        typical_p=body.typical_p,
        repetition_penalty=body.repetition_penalty,
        presence_penalty=body.presence_penalty,
        frequency_penalty=body.frequency_penalty,
        logit_bias=logit_bias(body) or None,
        allowed_token_ids=None if body.allowed_token_ids is None else sorted(set(body.allowed_token_ids)),
        bad_words=_bad_words(body.bad_words, tokenizer) if body.bad_words else None,
        min_tokens=body.min_tokens,
        stop_token_ids=body.stop_token_ids,
        ignore_eos=body.ignore_eos,
        prompt_logprobs=body.prompt_logprobs,
    )


def logit_bias(body: SamplingFields) -> dict[int, float]:
    """Keys as ids, values clamped to -100..100 as in vLLM; raises InvalidRequest."""
    bias = body.logit_bias or {}
    if len(bias) > 300:
        raise InvalidRequest(f"logit_bias must have at most 300 entries, got {len(bias)}.", "logit_bias")
    if not all(key.isascii() and key.isdigit() and len(key) < 10 for key in bias):
        raise InvalidRequest("logit_bias: keys must be token ids.", "logit_bias")
    if any(map(math.isnan, bias.values())):  # texts may write it
        raise InvalidRequest("logit_bias: values must be numbers.", "logit_bias")
    return {int(key): max(-100.0, min(100.0, value)) for key, value in bias.items()}


def _bad_words(words: list[str], tokenizer: ModelTokenizer) -> list[list[int]]:
    """The ids of each word at the start of a text and after a space."""
    sequences = []
    for word in words:
        for text in (word.lstrip(), " " + word.lstrip()):
            ids = tokenizer.fast.encode(text, add_special_tokens=False).ids
            if ids and ids not in sequences:
                sequences.append(ids)
    return sequences
