"""The one internal form of a request. A dialect builds it; nothing behind this point knows which dialect it was."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any, Literal

from engine.sampling.params import Grammar, SamplingParams


@dataclass(frozen=True, slots=True)
class TextPrompt:
    """Text to tokenise; `add_special_tokens` as the model's tokenizer does (a leading BOS, say)."""

    text: str
    add_special_tokens: bool = True


@dataclass(frozen=True, slots=True)
class TokenPrompt:
    """Token ids as they are."""

    token_ids: list[int]


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """Messages for the model's own chat template."""

    messages: list[dict[str, Any]]
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    add_special_tokens: bool = False
    template_arguments: dict[str, Any] = field(default_factory=dict)


Prompt = TextPrompt | TokenPrompt | ChatPrompt


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingOverrides:
    """The fields of `SamplingParams` that a client set, under the same names.

    None is a field that the client left out: it comes from the model's generation_config.json, then from
    `SamplingParams`.
    """

    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    typical_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    relative_frequency_penalty: float | None = None
    logit_bias: dict[int, float] | None = None
    allowed_token_ids: list[int] | None = None
    bad_words: list[list[int]] | None = None
    min_tokens: int | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    logprobs_mode: Literal["raw", "processed"] | None = None
    logprob_token_ids: list[int] | None = None
    watermark: bool | None = None

    @property
    def given(self) -> dict[str, Any]:
        """The fields that are set, by name."""
        return {f.name: value for f in fields(self) if (value := getattr(self, f.name)) is not None}


@dataclass(frozen=True, slots=True)
class GrammarRequest:
    """What the output must look like, and the client's `field` that asked for it, for errors."""

    grammar: Grammar
    field: str


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """One prompt and how to continue it `n` times.

    `max_tokens` None means the rest of the context. Sequence i samples with `seed + i`. `truncate_left` keeps the last
    so many prompt tokens, `truncate_right` the first. `token_texts` asks for each token's own text, special tokens
    included, and for stop strings to be looked for in that text.
    """

    model: str | None
    prompt: Prompt
    sampling: SamplingOverrides = field(default_factory=SamplingOverrides)
    grammar: GrammarRequest | None = None
    max_tokens: int | None = None
    seed: int | None = None
    n: int = 1
    beams: bool = False
    """The n sequences are the best of a beam search, their scores divided by length to the power `length_penalty`."""
    length_penalty: float = 1.0
    stop: list[str] = field(default_factory=list)
    include_stop: bool = False
    skip_special_tokens: bool = True
    token_texts: bool = False
    truncate_left: int | None = None
    truncate_right: int | None = None
    cache_salt: str = ""
    priority: int = 0
    """Smaller goes first where requests wait."""
    use_model_defaults: bool = True
    timeout_s: float | None = None
    """A deadline below the server's own."""
    longest_s: float | None = None
    """The operator's deadline for this dialect, in place of the server's own."""
    max_prompt_tokens: int | None = None
    """A limit below the model's own."""
    number: int = 0
    """Of the prompt among those of one answer."""


def sampling_params(
    overrides: SamplingOverrides, *, max_tokens: int, seed: int, grammar: Grammar | None, defaults: dict[str, float]
) -> SamplingParams:
    """The engine's form, with the model's own `defaults` under the client's choices."""
    known: dict[str, Any] = dict(defaults)
    if "top_k" in known:
        known["top_k"] = int(known["top_k"])
    return SamplingParams(max_tokens=max_tokens, seed=seed, grammar=grammar, **{**known, **overrides.given})
