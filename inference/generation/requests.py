"""The dialect-independent request. A dialect builds it; code below this layer never sees the dialect."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, Literal

from engine.sampling.params import Grammar, SamplingParams

if TYPE_CHECKING:
    from engine.kv_transfer.handle import KvSource


@dataclass(frozen=True, slots=True)
class TextPrompt:
    """Text to tokenise; `add_special_tokens` adds those of the model's tokenizer (a leading BOS, for example)."""

    text: str
    add_special_tokens: bool = True


@dataclass(frozen=True, slots=True)
class TokenPrompt:
    """Token ids, used unchanged. `chat`: they are those of a conversation, which the model's template has made."""

    token_ids: list[int]
    chat: bool = False


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """Messages for the model's chat template."""

    messages: list[dict[str, Any]]
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    add_special_tokens: bool = False
    template_arguments: dict[str, Any] = field(default_factory=dict)


Prompt = TextPrompt | TokenPrompt | ChatPrompt


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingOverrides:
    """The fields of `SamplingParams` that a client set, under the same names.

    None: the client did not set the field; the model's generation_config.json applies, then the default of
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
    """In order, without duplicates: there may be as many as the vocabulary has, for each of many prompts."""
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
    """The grammar of the output, and the client's `field` that asked for it, for errors."""

    grammar: Grammar
    field: str


@dataclass(frozen=True, slots=True)
class RemoteBlocks:
    """The KV blocks of the prompt, which a worker holds: `worker` is its id and epoch as `ID@EPOCH`."""

    worker: str
    transfer_id: str


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """One prompt and how to continue it `n` times.

    `max_tokens` None means the rest of the context. Sequence i samples with `seed + i`. `truncate_left` keeps that
    many prompt tokens from the end, `truncate_right` from the start. `token_texts` asks for the text of each token,
    including special tokens; stop strings are then searched in that text.
    """

    model: str | None
    prompt: Prompt
    sampling: SamplingOverrides = field(default_factory=SamplingOverrides)
    grammar: GrammarRequest | None = None
    max_tokens: int | None = None
    seed: int | None = None
    n: int = 1
    beams: bool = False
    """The n sequences are the best of a beam search; scores are divided by length to the power `length_penalty`."""
    length_penalty: float = 1.0
    stop: list[str] = field(default_factory=list)
    include_stop: bool = False
    skip_special_tokens: bool = True
    token_texts: bool = False
    steps: bool = False
    """Each step is a delta of its own, also for a reader that lags; else what it did not take is one."""
    truncate_left: int | None = None
    truncate_right: int | None = None
    cache_salt: str = ""
    session: str = ""
    """The client's name for requests that belong together; they prefer one worker."""
    end_user: str = ""
    """The client's name for its own user, for the count of usage."""
    priority: int = 0
    """Smaller values are scheduled first."""
    use_model_defaults: bool = True
    timeout_s: float | None = None
    """A deadline below the server's."""
    longest_s: float | None = None
    """The operator's deadline for this dialect, instead of the server's."""
    max_prompt_tokens: int | None = None
    """A limit below the model's."""
    generated: list[int] = field(default_factory=list)
    """Tokens that the only sequence got elsewhere; its first delta has them, and they count as its own."""
    source: KvSource | None = None
    """Where another server's worker has the prompt's KV blocks, and those of the `generated` tokens but the last."""
    first_only: bool = False
    """The only sequence ends after one more token, without a finish reason if it could go on: elsewhere."""
    number: int = 0
    """Index of the prompt in its response."""
    prompt_field: str = "prompt"
    """The prompt's name in the client's body, for errors."""
    hold: bool = False
    """Hold the prompt's blocks for another request; only with one sequence, and `max_tokens` 1 or `first_only`."""
    blocks: RemoteBlocks | None = None
    """Where the prompt's blocks are, from such a request."""


def sampling_params(
    overrides: SamplingOverrides, *, max_tokens: int, seed: int, grammar: Grammar | None, defaults: dict[str, float]
) -> SamplingParams:
    """The engine's sampling parameters: the client's values over the model's `defaults`."""
    known: dict[str, Any] = dict(defaults)
    if "top_k" in known:
        known["top_k"] = int(known["top_k"])
    return SamplingParams(max_tokens=max_tokens, seed=seed, grammar=grammar, **{**known, **overrides.given})
