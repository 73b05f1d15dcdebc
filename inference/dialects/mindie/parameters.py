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


def stop_strings(fields: Fields, longest: int | None = MAX_STOP_LENGTH) -> list[str]:
    """`stop`: a string or a list of strings. `longest` limits a string that is not in a list."""
    value = fields.get("stop")
    if value is None:
        return []
    texts = [value] if isinstance(value, str) else value
    if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
        raise invalid("Parameter stop must be string or list[string] type.")
    if len(texts) > MAX_STOP_STRINGS:
        raise invalid(f"Parameter stop must have at most {MAX_STOP_STRINGS} items, got {len(texts)}.")
    alone = isinstance(value, str)
    for text in texts:
        limit = longest if alone else MAX_STOP_LENGTH
        if not text or (limit is not None and utf16_length(text) > limit):
            raise invalid(f"Each string of parameter stop must have a length in [1,{limit or 'limit'}].")
    if not alone and sum(map(utf16_length, texts)) > MAX_STOP_TOTAL:
        raise invalid(f"The strings of parameter stop must have at most {MAX_STOP_TOTAL} characters together.")
    return texts


def stop_token_ids(fields: Fields) -> list[int]:
    """`stop_token_ids`; ids outside the vocabulary are dropped later."""
    value = fields.get("stop_token_ids")
    if value is None:
        return []
    if not isinstance(value, list):
        raise invalid("Parameter stop_token_ids not array")
    if not all(isinstance(item, int) and not isinstance(item, bool) for item in value):
        raise invalid("Parameter stop_token_ids not list[int]")
    return value


def utf16_length(text: str) -> int:
    """The length in UTF-16 units, as MindIE counts characters."""
    return len(text.encode("utf-16-le", "surrogatepass")) // 2


def text_of(value: Any, name: str, settings: MindieSettings, wrong: str, empty_list: str) -> str:
    """A text, or a list of parts whose texts are joined; `wrong` and `empty_list` are the endpoint's errors."""
    if isinstance(value, list):
        if not value:
            raise invalid(empty_list)
        value = "".join(part_text(part, name) for part in value)
    if not isinstance(value, str):
        raise invalid(wrong)
    length = utf16_length(value)
    if not 1 <= length <= settings.max_request_bytes:
        raise invalid(f"Parameter {name} length must be in [1,{settings.max_request_bytes}], got {length}.")
    return value


def part_text(part: Any, name: str) -> str:
    """The text of one part; a text model refuses images, video and audio."""
    kind = part.get("type") if isinstance(part, dict) else None
    if kind != "text":
        raise invalid(f"{name}: parts of type {str(kind)[:40]} are not supported by this model.")
    if not isinstance(part.get("text"), str):
        raise invalid("text must be string type.")
    text: str = part["text"]
    return text


def sequences_of(
    n: int | None,
    best_of: int | None,
    sampling: Sampling,
    settings: MindieSettings,
    batch: int,
    prefill_batch: int,
    beams: bool = False,
) -> int:
    """The number of sequences to generate, from `n` and `best_of`, with the error texts of vLLM's endpoint.

    Beam search needs no sampling.
    """
    wanted = best_of if best_of is not None else (n or 1)
    if best_of is not None and best_of < (n or 1):
        raise invalid("best_of must be greater than or equal to n")
    if wanted > 1 and not sampling.temperature and not beams:
        values = f"but best_of is {best_of}, n is {n}."
        raise invalid(f"Best_of/N can not greater than 1 when temperature is 0 or not set, {values}")
    if wanted > 1 and settings.async_scheduling:
        raise invalid("best_of/n greater than 1 are not supported by this endpoint")
    limits = {"max_batch_size": batch, "max_prefill_batch_size": prefill_batch, "max_n": settings.max_n}
    for key, limit in limits.items():
        if wanted > limit:
            raise invalid(
                f"The n parameter ({wanted}) exceeds '{key}' ({limit}). "
                f"Please reduce n or increase '{key}' in config.json of mindie-service. "
            )
    return wanted
