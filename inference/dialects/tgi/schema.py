"""The body of the generate routes, its defaults, and its validation in the router's order with the router's texts."""

from __future__ import annotations

import secrets
from typing import TYPE_CHECKING, Any

import msgspec

from inference.chat.conversation import ends_with_assistant
from inference.dialects.tgi.errors import invalid, undeserialisable
from inference.errors import InvalidRequest
from inference.generation.requests import ChatPrompt, GenerationRequest, GrammarRequest, SamplingOverrides, TokenPrompt
from inference.http.validation import convert
from inference.vendors import tgi_grammar
from inference.workers.tokenizer import length_in_words

if TYPE_CHECKING:
    from inference.services import Limits

CHUNK = 1024
"""The router validates at most this many new tokens against the context; more are truncated to what fits."""


class GenerateParameters(msgspec.Struct):
    """`parameters`. Fields without `None` in their type refuse null, as in the router."""

    best_of: int | None = None
    temperature: float | None = None
    repetition_penalty: float | None = None
    frequency_penalty: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    typical_p: float | None = None
    do_sample: bool = False
    max_new_tokens: int | None = None
    return_full_text: bool | None = None
    stop: list[str] = []
    truncate: int | None = None
    watermark: bool = False
    details: bool = False
    decoder_input_details: bool = False
    seed: int | None = None
    top_n_tokens: int | None = None
    grammar: dict[str, Any] | None = None
    adapter_id: str | None = None

    @property
    def sampling(self) -> bool:
        """Whether tokens are sampled; else decoding is greedy."""
        return (
            self.do_sample
            or (self.temperature or 1.0) != 1.0
            or self.top_k is not None
            or self.top_p is not None
            or self.typical_p is not None
            # The router takes any temperature for sampling here; one of 1.0 would make equal texts.
            or ((self.best_of or 1) > 1 and self.temperature is not None)
        )


class GenerateRequest(msgspec.Struct):
    """POST /generate and /generate_stream. Absent `parameters` imply sampling, present ones do not."""

    inputs: str
    parameters: GenerateParameters = msgspec.field(default_factory=lambda: GenerateParameters(do_sample=True))


class CompatGenerateRequest(GenerateRequest):
    """POST /."""

    stream: bool = False


def parse(value: dict[str, Any], schema: type[GenerateRequest]) -> Any:
    """Parse the body; raises the router's JSON error."""
    try:
        request = convert(value, schema)
    except InvalidRequest as error:
        raise undeserialisable(error) from error
    unsigned = {"best_of": 64, "max_new_tokens": 32, "truncate": 64, "seed": 64, "top_n_tokens": 32}
    for name, bits in unsigned.items():
        number = getattr(request.parameters, name)
        if number is not None and not 0 <= number < 1 << bits:
            text = f"parameters.{name}: invalid value: integer `{number}`, expected u{bits}"
            raise undeserialisable(InvalidRequest(text, f"parameters.{name}"))
    if request.parameters.top_k is not None and not -(1 << 31) <= request.parameters.top_k < 1 << 31:
        text = f"parameters.top_k: invalid value: integer `{request.parameters.top_k}`, expected i32"
        raise undeserialisable(InvalidRequest(text, "parameters.top_k"))
    return request


def validate(request: GenerateRequest, limits: Limits, max_total_tokens: int, streaming: bool) -> None:
    """The router's checks before tokenising, in its order."""
    p = request.parameters
    best_of = 1 if p.best_of is None else p.best_of
    if streaming and best_of != 1:
        raise invalid("`best_of` != 1 is not supported when streaming tokens", "best_of")
    if streaming and p.decoder_input_details:
        text = "`decoder_input_details` == true is not supported when streaming tokens"
        raise invalid(text, "decoder_input_details")
    if best_of > 1 and limits.max_best_of == 1:
        raise invalid("`best_of` != 1 is not allowed for this endpoint", "best_of")
    if best_of > limits.max_best_of:
        raise invalid(f"`best_of` must be > 0 and <= {limits.max_best_of}. Given: {best_of}", "best_of")
    if best_of > 1 and not p.sampling:
        raise invalid("you must use sampling when `best_of` is > 1", "best_of")
    if p.temperature is not None and p.temperature <= 0:
        raise invalid("`temperature` must be strictly positive", "temperature")
    if p.repetition_penalty is not None and p.repetition_penalty <= 0:
        raise invalid("`repetition_penalty` must be strictly positive", "repetition_penalty")
    if p.frequency_penalty is not None and not -2 <= p.frequency_penalty <= 2:
        raise invalid("`frequency_penalty` must be >= -2.0 and <= 2.0", "frequency_penalty")
    if p.top_p is not None and not 0 < p.top_p < 1:
        raise invalid("`top_p` must be > 0.0 and < 1.0", "top_p")
    if p.typical_p is not None and not 0 < p.typical_p < 1:
        raise invalid("`typical_p` must be > 0.0 and < 1.0", "typical_p")
    if p.top_k is not None and p.top_k <= 0:
        raise invalid("`top_k` must be strictly positive", "top_k")
    if p.max_new_tokens == 0:
        raise invalid("`max_new_tokens` must be strictly positive", "max_new_tokens")
    if len(p.stop) > limits.max_stop_sequences:
        limit = limits.max_stop_sequences
        raise invalid(f"`stop` supports up to {limit} stop sequences. Given: {len(p.stop)}", "stop")
    if p.seed is not None and best_of > 1:
        raise invalid("`seed` must not be set when `best_of` > 1", "seed")
    if p.top_n_tokens is not None and p.top_n_tokens > limits.max_top_n_tokens:
        limit = limits.max_top_n_tokens
        raise invalid(f"`top_n_tokens` must be >= 0 and <= {limit}. Given: {p.top_n_tokens}", "top_n_tokens")
    if not request.inputs:
        raise invalid("`inputs` cannot be empty", "inputs")
    longest = max_total_tokens - 1
    if p.truncate is not None and not 0 < p.truncate <= longest:
        text = f"`truncate` must be strictly positive and less than {longest}. Given: {p.truncate}"
        raise invalid(text, "truncate")


def validate_length(prompt: list[int], p: GenerateParameters, max_total_tokens: int) -> None:
    """The router's two length checks, total before input."""
    input_length, told = len(prompt), length_in_words(prompt)
    wanted = max(0, max_total_tokens - input_length) if p.max_new_tokens is None else p.max_new_tokens
    new = min(wanted, CHUNK)
    if input_length + new > max_total_tokens:
        text = (
            f"`inputs` tokens + `max_new_tokens` must be <= {max_total_tokens}. "
            f"Given: {told} `inputs` tokens and {new} `max_new_tokens`"
        )
        raise invalid(text, "max_new_tokens")
    if input_length > max_total_tokens - 1:
        text = f"`inputs` must have less than {max_total_tokens - 1} tokens. Given: {told}"
        raise invalid(text, "inputs")


def generation_request(
    request: GenerateRequest, prompt: TokenPrompt, grammar: GrammarRequest | None, with_tokens: bool
) -> GenerationRequest:
    """The GenerationRequest. TGI reports log-probabilities of the distribution that was sampled from."""
    p = request.parameters
    return GenerationRequest(
        steps=True,
        model=p.adapter_id,
        prompt=prompt,
        sampling=SamplingOverrides(
            temperature=(p.temperature or 1.0) if p.sampling else 0.0,
            top_k=p.top_k,
            top_p=p.top_p,
            typical_p=p.typical_p,
            repetition_penalty=p.repetition_penalty,
            relative_frequency_penalty=p.frequency_penalty,
            logprobs=(p.top_n_tokens or 0) if with_tokens else None,
            logprobs_mode="processed" if with_tokens else None,
            prompt_logprobs=0 if p.decoder_input_details else None,
            watermark=p.watermark or None,
        ),
        grammar=grammar,
        max_tokens=p.max_new_tokens,
        seed=secrets.randbits(64) if p.seed is None else p.seed,
        n=p.best_of or 1,
        stop=[text for text in p.stop if text],
        include_stop=True,
        token_texts=True,
        use_model_defaults=False,
    )


def chat_prompt(messages: list[dict[str, Any]], arguments: dict[str, Any] | None = None) -> ChatPrompt:
    """The conversation as the router renders it: a final message of the assistant is continued."""
    continued = ends_with_assistant(messages)
    return ChatPrompt(
        messages,
        add_generation_prompt=not continued,
        continue_final_message=continued,
        template_arguments=arguments or {},
    )


def grammar_of(given: dict[str, Any] | None) -> GrammarRequest | None:
    """The grammar, which the router checks last."""
    if given is None:
        return None
    try:
        return tgi_grammar.grammar_of(given, "grammar")
    except InvalidRequest as error:
        raise invalid(error.message, "grammar") from error
