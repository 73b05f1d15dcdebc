"""The sampling parameters of one request. Plain data without validation."""

from __future__ import annotations

from typing import Literal

import msgspec

GREEDY_BELOW = 1e-5
"""A temperature under this is greedy decoding (the threshold vLLM uses)."""


class Grammar(msgspec.Struct, frozen=True, array_like=True):
    """The form of the output. `text` is a JSON schema, a regular expression, a JSON list of choices, a grammar in the
    syntax of Lark or GBNF, a JSON list of tags {"begin", "schema", "end", "trigger"} that the output may contain, or,
    for "either", a JSON list of pairs [kind, text], one of which the output has.

    Reasoning before the output is not constrained: from the token `reasoning_begin` to `reasoning_end`. `reasoning`:
    the prompt already began it.
    """

    kind: Literal["json_schema", "regex", "choice", "grammar", "structural_tag", "either"]
    text: str
    reasoning_begin: int | None = None
    reasoning_end: int | None = None
    reasoning: bool = False


class SamplingParams(msgspec.Struct, frozen=True, omit_defaults=True):
    """The sampling parameters of one request, already validated by the sender.

    `top_k` 0 means off; `seed` is unsigned 64-bit and always set by the sender, so that a sampled request can be
    repeated. `logprobs` and `prompt_logprobs` count alternatives besides the chosen token; 0 is the chosen token
    only, -1 the whole vocabulary, None nothing. `logprobs_mode` "raw" reports the model's own distribution, over
    what a grammar allows (OpenAI, vLLM), "processed" the one that was sampled from (TGI).
    `relative_frequency_penalty` is TGI's: count / length over prompt and output; `frequency_penalty` is OpenAI's:
    count over the output alone.
    """

    max_tokens: int
    seed: int = 0
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    typical_p: float = 1.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    relative_frequency_penalty: float = 0.0
    logit_bias: dict[int, float] | None = None
    allowed_token_ids: list[int] | None = None
    bad_words: list[list[int]] | None = None
    min_tokens: int = 0
    stop_token_ids: list[int] = []
    ignore_eos: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    logprobs_mode: Literal["raw", "processed"] = "raw"
    grammar: Grammar | None = None
    logprob_token_ids: list[int] | None = None
    """Report the log-probabilities of these tokens as the alternatives, instead of the most likely ones."""
    watermark: bool = False
    """Prefer at each position a half of the vocabulary that depends on the previous token
    (`engine.sampling.watermark`).
    """

    @property
    def greedy(self) -> bool:
        """Whether the most likely token is always taken."""
        return self.temperature < GREEDY_BELOW

    @property
    def filtered(self) -> bool:
        """Whether sampling is cut to fewer candidates than the vocabulary."""
        return self.top_k > 0 or self.top_p < 1 or self.min_p > 0 or self.typical_p < 1

    @property
    def independent(self) -> bool:
        """Whether sampling depends on the logits alone and not on earlier tokens."""
        return self.grammar is None and not self.bad_words and not self.penalised

    @property
    def penalised(self) -> bool:
        """Whether earlier tokens change the logits."""
        return bool(
            self.repetition_penalty != 1
            or self.presence_penalty
            or self.frequency_penalty
            or self.relative_frequency_penalty
            or self.watermark
        )
