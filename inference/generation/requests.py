"""The one internal form of a request. A dialect builds it; nothing behind this point knows which dialect it was."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from engine.sampling.params import SamplingParams


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


@dataclass(slots=True)
class GenerationRequest:
    """One prompt and how to continue it `n` times.

    `sampling` holds the SamplingParams fields that the client set; what it left out comes from the model's
    generation_config.json and then from SamplingParams. `max_tokens` None means the rest of the context.
    Sequence i samples with `seed + i`. `truncate_left` keeps the last so many prompt tokens, `truncate_right` the
    first. `token_texts` asks for each token's own text, special tokens included, and for stop strings to be looked
    for in that text.
    """

    model: str | None
    prompt: Prompt
    sampling: dict[str, Any] = field(default_factory=dict)
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
    grammar_field: str | None = None
    """The client's field that the grammar in `sampling` came from."""

    def params(self, max_tokens: int, seed: int, defaults: dict[str, float]) -> SamplingParams:
        """The engine's form, with the model's own defaults under the client's choices."""
        known = {name: value for name, value in defaults.items() if self.use_model_defaults}
        if "top_k" in known:
            known["top_k"] = int(known["top_k"])
        return SamplingParams(max_tokens=max_tokens, seed=seed, **{**known, **self.sampling})
