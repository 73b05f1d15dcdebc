"""MindIE's sampling rules and error texts, shared by its endpoints: sampling, stop conditions, prompts."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from inference.dialects.mindie.errors import invalid
from inference.generation.requests import SamplingOverrides

if TYPE_CHECKING:
    from inference.dialects.mindie.fields import Fields
    from inference.dialects.mindie.settings import MindieSettings

MAX_TOP_K = 1000
MAX_STOP_STRINGS, MAX_STOP_LENGTH, MAX_STOP_TOTAL = 1024, 1024, 32768
MAX_STOP_TOKEN_IDS = 1024
"""Our own limit: MindIE has none but that of the body."""


@dataclass(slots=True)
class Sampling:
    """The sampling parameters of a request. None: not given."""

    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    do_sample: bool | None = None
    seed: int | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    stop: list[str] = field(default_factory=list)
    stop_token_ids: list[int] = field(default_factory=list)
    include_stop: bool = False
    skip_special_tokens: bool = True
    ignore_eos: bool = False

    def sampled(self, sequences: int) -> bool:
        """Whether tokens are sampled: `do_sample` decides, else whether any of the three parameters is set, unless
        the temperature is 0.
        """
        if self.temperature == 0 or self.do_sample is False:
            return False
        named = (self.temperature, self.top_k, self.top_p)
        return bool(self.do_sample) or any(value is not None for value in named) or sequences > 1

    def overrides(self, sequences: int, vocab_size: int, logprobs: int | None) -> SamplingOverrides:
        """The engine's sampling parameters; the model's generation_config is not used."""
        sampled = self.sampled(sequences)
        temperature = 0.0
        if sampled:
            temperature = 1.0 if self.temperature is None else self.temperature
        top_k = None
        if sampled and self.top_k is not None and self.top_k > 0:
            top_k = min(self.top_k, vocab_size, MAX_TOP_K)
        return SamplingOverrides(
            temperature=temperature,
            top_k=top_k,
            top_p=self.top_p if sampled else None,
            repetition_penalty=self.repetition_penalty,
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            stop_token_ids=[t for t in self.stop_token_ids if 0 <= t < vocab_size],
            ignore_eos=self.ignore_eos or None,
            logprobs=logprobs,
        )


def stop_strings(fields: Fields, limited: bool) -> list[str]:
    """`stop`: a string, or a list of strings of 1 to MAX_STOP_LENGTH characters, MAX_STOP_TOTAL in all.

    `limited` is the rule of TGI and of OpenAI's own flavour: a lone string is as short as those of a list, of which there
    are at most MAX_STOP_STRINGS. Elsewhere only the total counts.
    """
    value = fields.get("stop")
    if value is None:
        return []
    if isinstance(value, str):
        length, longest = utf16_length(value), MAX_STOP_LENGTH if limited else MAX_STOP_TOTAL
        if not 1 <= length <= longest:
            raise invalid(f"Input validation error: length of `stop` must be in [1, {longest}], but got {length}")
        return [value]
    if not isinstance(value, list):
        raise invalid("Input validation error: param stop must be string or list[string]")
    lengths = [utf16_length(text) if isinstance(text, str) else 0 for text in value]
    wrong = any(not 1 <= length <= MAX_STOP_LENGTH for length in lengths)
    if wrong or sum(lengths) > MAX_STOP_TOTAL or (limited and len(value) > MAX_STOP_STRINGS):
        raise invalid(
            "Input validation error: `stop` must be list[string] if list, and item length in "
            f"[1, {MAX_STOP_LENGTH}] with total <= {MAX_STOP_TOTAL}"
        )
    return value


def include_stop(fields: Fields) -> bool:
    """`include_stop_str_in_output`, which is read only beside a stop condition."""
    if fields.values.keys().isdisjoint(("stop", "stop_token_ids")):
        return False
    return bool(fields.boolean("include_stop_str_in_output"))


def stop_token_ids(fields: Fields) -> list[int]:
    """`stop_token_ids`; ids outside the vocabulary are dropped later."""
    value = fields.get("stop_token_ids")
    if value is None:
        return []
    if not isinstance(value, list):
        raise invalid("Parameter stop_token_ids not array")
    if not all(isinstance(item, int) and not isinstance(item, bool) for item in value):
        raise invalid("Parameter stop_token_ids not list[int]")
    different = list(dict.fromkeys(value))
    if len(different) > MAX_STOP_TOKEN_IDS:
        raise invalid(
            f"Parameter stop_token_ids must have at most {MAX_STOP_TOKEN_IDS} different ids, but got {len(different)}"
        )
    return different


def utf16_length(text: str) -> int:
    """The length in UTF-16 units, as MindIE counts characters."""
    return len(text.encode("utf-16-le", "surrogatepass")) // 2


@dataclass(frozen=True, slots=True)
class TextErrors:
    """An endpoint's error texts for its input; `length` has the fields `limit` and `length`."""

    missing: str
    empty: str
    """For an empty list."""
    type: str
    length: str


def text_of(value: Any, settings: MindieSettings, errors: TextErrors) -> str:
    """A text, or a list of parts whose texts are joined."""
    if value is None:
        raise invalid(errors.missing)
    if isinstance(value, list):
        if not value:
            raise invalid(errors.empty)
        value = "".join(map(part_text, value))
    if not isinstance(value, str):
        raise invalid(errors.type)
    length = utf16_length(value)
    if not 1 <= length <= settings.max_request_bytes:
        raise invalid(errors.length.format(limit=settings.max_request_bytes, length=length))
    return value


def part_text(part: Any) -> str:
    """The text of one part; a text model refuses images, video and audio."""
    if isinstance(part, dict) and not isinstance(part.get("text", ""), str):
        raise invalid("Request param text must be string")
    kind = part.get("type") if isinstance(part, dict) else None
    if kind != "text" or "text" not in part:
        raise invalid(f"Parts of type {str(kind)[:40]} are not supported by this model.")
    text: str = part["text"]
    return text
