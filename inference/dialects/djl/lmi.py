"""LMI's request schema: `inputs`, `parameters` and `stream`, checked and turned into GenerationRequests."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import msgspec

from inference.dialects.djl.errors import PARSING, LmiError
from inference.errors import InvalidRequest
from inference.generation.beam_search import check_beams
from inference.generation.requests import GenerationRequest, SamplingOverrides, TextPrompt
from inference.http.validation import check_count, check_range, convert
from inference.vendors.vllm_sampling import SamplingFields, check_sampling, sampling_overrides

if TYPE_CHECKING:
    from inference.services import Limits
    from inference.workers.target import Target

DEFAULT_NEW_TOKENS = 30
MAX_TOKENS = 1 << 31


class LmiParameters(msgspec.Struct):
    """Generation parameters, with vLLM's additional ones. Unknown ones are ignored, as in LMI."""

    do_sample: bool | None = None
    seed: int | None = None
    temperature: float | None = None
    repetition_penalty: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    typical_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    max_new_tokens: int | None = None
    min_tokens: int | None = None
    truncate: int | None = None
    details: bool | None = None
    return_full_text: bool | None = None
    decoder_input_details: bool | None = None
    stop_sequences: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos_token: bool | None = None
    top_n_tokens: int | None = None
    skip_special_tokens: bool | None = None
    n: int | None = None
    best_of: int | None = None
    num_beams: int | None = None
    length_penalty: float | None = None
    output_formatter: Literal["json", "jsonlines", "sse"] | None = None

    @property
    def sequences(self) -> int:
        """How many sequences are generated for each input."""
        return self.num_beams or self.n or self.best_of or 1


class LmiRequest(msgspec.Struct):
    """The body of an inference request."""

    inputs: str | list[str]
    parameters: LmiParameters | None = None
    stream: bool | None = None


@dataclass(frozen=True, slots=True)
class Parsed:
    """A checked request. `form` is the shape of its answer: one JSON document, or a stream of lines or events."""

    texts: list[str]
    parameters: LmiParameters
    form: Literal["json", "jsonlines", "sse"]
    as_list: bool


def parse(body: dict[str, Any], limits: Limits) -> Parsed:
    """Parse and check; raises LmiError for a wrong shape, InvalidRequest for a value out of range."""
    known = {name: body[name] for name in ("inputs", "parameters", "stream") if body.get(name) is not None}
    if "inputs" not in known:
        raise LmiError(
            f"{PARSING}Invalid request payload. Request payload should be a json object specifying the 'inputs' field."
        )
    try:
        request = convert(known, LmiRequest)
    except InvalidRequest as error:
        raise LmiError(f"{PARSING}{error.message}") from error
    as_list = isinstance(request.inputs, list)
    texts = [request.inputs] if isinstance(request.inputs, str) else request.inputs
    if not texts or not all(texts):
        raise LmiError(f"{PARSING}Invalid request payload. The 'inputs' field does not contain any content.")
    check_count("inputs", texts, limits.max_prompts)
    parameters = request.parameters or LmiParameters()
    form = parameters.output_formatter or ("jsonlines" if request.stream else "json")
    _check(parameters, limits)
    if form != "json":
        _check_stream(parameters)
    if len(texts) * parameters.sequences > limits.max_sequences:
        raise InvalidRequest(f"inputs times n must be at most {limits.max_sequences}.", "n")
    return Parsed(texts, parameters, form, as_list)


def _check(p: LmiParameters, limits: Limits) -> None:
    check_range("max_new_tokens", p.max_new_tokens, 1, MAX_TOKENS)
    check_range("truncate", p.truncate, 1, MAX_TOKENS)
    check_range("top_n_tokens", p.top_n_tokens, 0, limits.max_logprobs)
    check_range("best_of", p.best_of, 1, limits.max_sequences)
    check_range("num_beams", p.num_beams, 1, limits.max_sequences)
    check_range("length_penalty", p.length_penalty, -10, 10)
    stops = _stops(p)
    check_count("stop_sequences", stops, limits.max_stop_strings)
    if any(not 0 < len(text) <= limits.max_stop_characters for text in stops):
        raise InvalidRequest(
            f"stop_sequences: each text must have 1 to {limits.max_stop_characters} characters.", "stop_sequences"
        )
    check_sampling(_sampling(p), limits)
    if p.best_of is not None and p.best_of != p.sequences:
        raise InvalidRequest("best_of must equal n: this server returns every sequence that it samples.", "best_of")
    if p.decoder_input_details and not p.details:
        raise InvalidRequest("decoder_input_details needs `details` to be true.", "decoder_input_details")


def _check_stream(p: LmiParameters) -> None:
    if p.decoder_input_details:
        raise InvalidRequest("decoder_input_details cannot be used with a stream.", "decoder_input_details")
    if p.sequences > 1:
        raise InvalidRequest("n, best_of and num_beams must be 1 in a stream.", "n")


def _stops(p: LmiParameters) -> list[str]:
    return [p.stop_sequences] if isinstance(p.stop_sequences, str) else p.stop_sequences or []


def _sampling(p: LmiParameters) -> SamplingFields:
    """The parameters under vLLM's names, checked by its ranges; greedy without `do_sample` and `temperature`."""
    greedy = p.do_sample is False or (p.do_sample is None and p.temperature is None)
    return SamplingFields(
        temperature=0.0 if greedy and p.temperature is None else p.temperature,
        top_p=p.top_p,
        top_k=p.top_k,
        min_p=p.min_p,
        typical_p=p.typical_p,
        repetition_penalty=p.repetition_penalty,
        presence_penalty=p.presence_penalty,
        frequency_penalty=p.frequency_penalty,
        n=p.n,
        min_tokens=p.min_tokens,
        stop_token_ids=p.stop_token_ids,
        ignore_eos=p.ignore_eos_token,
        seed=p.seed,
    )


def generation_request(parsed: Parsed, number: int, model: str, target: Target) -> GenerationRequest:
    """The request of one of the texts; `model` names the deployment and its adapter."""
    p = parsed.parameters
    fields = _sampling(p)
    beams = (p.num_beams or 1) > 1
    with_tokens = parsed.form != "json" or bool(p.details) or p.sequences > 1
    overrides = sampling_overrides(fields, target.tokenizer)
    given = {
        **overrides.given,
        "temperature": 0.0 if p.do_sample is False else overrides.temperature,
        "logprobs": (p.top_n_tokens or 0) if with_tokens and not beams else None,
        "prompt_logprobs": 0 if p.decoder_input_details else None,
    }
    stops = _stops(p)
    request = GenerationRequest(
        steps=True,
        model=model,
        prompt=TextPrompt(parsed.texts[number]),
        sampling=SamplingOverrides(**given),
        max_tokens=DEFAULT_NEW_TOKENS if p.max_new_tokens is None else p.max_new_tokens,
        seed=fields.engine_seed,
        n=p.sequences,
        beams=beams,
        length_penalty=1.0 if p.length_penalty is None else p.length_penalty,
        stop=stops,
        include_stop=bool(p.include_stop_str_in_output),
        skip_special_tokens=p.skip_special_tokens is not False,
        # With stop strings a token's text is what the search for them releases, so that no token shows a part of one.
        token_texts=not stops and not beams,
        truncate_left=p.truncate,
        use_model_defaults=False,
        number=number,
    )
    if beams:
        try:
            check_beams(request)
        except InvalidRequest as error:
            raise InvalidRequest(error.message.replace("use_beam_search", "num_beams"), error.field) from error
    return request
