"""MindIE's vLLM dialect, POST /generate with `prompt`; also selects the dialect of a POST /generate."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from inference.dialects.mindie import tgi
from inference.dialects.mindie.answer import counted
from inference.dialects.mindie.errors import MindieError, invalid
from inference.dialects.mindie.fields import Fields
from inference.dialects.mindie.parameters import (
    Sampling,
    TextErrors,
    include_stop,
    stop_strings,
    stop_token_ids,
    text_of,
    utf16_length,
)
from inference.dialects.mindie.requests import Form, InferenceRequest, MessageType
from inference.dialects.mindie.sequences import Combination, check_batch, parse_best_of, parse_n
from inference.generation.answer import Reply
from inference.generation.requests import TextPrompt
from inference.http.exchange import Response, json_response

if TYPE_CHECKING:
    from inference.dialects.mindie.answer import Incoming
    from inference.dialects.mindie.clocks import Clock
    from inference.dialects.mindie.settings import MindieSettings
    from inference.dialects.mindie.state import MindieState
    from inference.generation.deltas import Delta
    from inference.generation.generation import Generation
    from inference.http.exchange import Exchange
    from inference.services import Services

NEITHER = (
    '{"Error": "`inputs` or `prompt` must be necessary and data type must be string. Additionally, the request body '
    'must be valid json", "error_type": "validation"}'
)
WRONG = TextErrors(
    missing="Contains not prompt or prompt null",
    empty="Prompt arr is empty",
    type="The type of prompt is abnormal",
    length="Prompt must be necessary and data type must be string and length in (0, {limit}], but the length of inputs is "
    "{length}",
)
MAX_MODEL_LENGTH = 256


async def generate(exchange: Exchange, services: Services, state: MindieState) -> None:
    """POST /generate: a body with `prompt` is vLLM's, else one with `inputs` is TGI's."""
    with counted(exchange, services, state) as incoming:
        body = await incoming.body(NEITHER)
        if body.get("prompt") is not None:
            await _run(incoming, body)
        elif body.get("inputs") is not None:
            await tgi.generate(incoming, body)
        else:
            raise MindieError(422, NEITHER)


async def _run(incoming: Incoming, body: dict[str, Any]) -> None:
    exchange, state = incoming.exchange, incoming.state
    state.check_accepting(incoming.services)
    prompt = await exchange.work(text_of, body["prompt"], state.settings, WRONG)
    request = await exchange.work(_parse, Fields(body), prompt, state)
    await incoming.answer(request, state.new_id(exchange))


def _parse(body: Fields, prompt: str, state: MindieState) -> InferenceRequest:
    """Parse the parameters in MindIE's order, which decides which error is reported."""
    sampling = Sampling(ignore_eos=bool(body.boolean("ignore_eos")))
    sampling.stop = stop_strings(body, limited=False)
    sampling.stop_token_ids = stop_token_ids(body)
    sampling.include_stop = include_stop(body)
    sampling.temperature = body.temperature()
    sampling.top_k = body.top_k(-1)
    sampling.top_p = body.top_p(open_high=False)
    sampling.seed = body.seed()
    sampling.repetition_penalty = body.repetition_penalty()
    sampling.frequency_penalty = body.frequency_penalty()
    sampling.presence_penalty = body.presence_penalty()
    sampling.skip_special_tokens = body.boolean("skip_special_tokens") is not False
    best_of = parse_best_of(body)
    capacity = state.capacity(state.lenient(None))
    n = parse_n(body, state.settings, capacity)
    model = _model(body)
    max_tokens = body.max_tokens()
    stream = bool(body.boolean("stream"))
    combination = Combination(n, best_of, sampling.temperature)
    combination.check_vllm()
    combination.check_scheduling(state.settings)
    check_batch("best_of", combination.wanted, state.settings, capacity)

    form = Form(kind=MessageType.VLLM, stream=stream, text=_shown(body.get("prompt")))
    return InferenceRequest(
        target=state.lenient(model),
        prompt=TextPrompt(prompt),
        sampling=sampling,
        max_tokens=max_tokens,
        form=form,
        make_reply=make_reply,
        sequences=combination.wanted,
    )


def make_reply(form: Form, settings: MindieSettings, generation: Generation, clock: Clock) -> Reply:
    """The reply of this form."""
    return VllmReply(generation, f"{form.text} ", settings.full_text_enabled)


def _model(body: Fields) -> str | None:
    model = body.get("model")
    if model is not None and not isinstance(model, str):
        raise invalid("Model must be string type.")
    length = 1 if model is None else utf16_length(model)
    if not 1 <= length <= MAX_MODEL_LENGTH:
        raise invalid(f"Input validation error: length of `model` must be in [1, {MAX_MODEL_LENGTH}], but got {length}")
    return model


def _shown(prompt: Any) -> str:
    """The text before every completion: the prompt, or the first text of a list."""
    if isinstance(prompt, list):
        prompt = next((part["text"] for part in prompt if isinstance(part, dict) and part.get("type") == "text"), "")
    return str(prompt)


class VllmReply(Reply):
    """All sequences of a prompt."""

    def __init__(self, generation: Generation, prefix: str, cumulative: bool) -> None:
        self._prefix, self._cumulative = prefix, cumulative
        self._texts = [""] * generation.request.n
        self._logprobs = [0.0] * generation.request.n

    def chunks(self, delta: Delta) -> list[bytes]:
        """One object and a NUL, with a slot for each sequence."""
        self.add(delta)
        slots = ["" for _ in self._texts]
        slots[delta.index] = delta.text
        return [msgspec.json.encode({"text": self._texts if self._cumulative else slots}) + b"\0"]

    def add(self, delta: Delta) -> None:
        self._texts[delta.index] += delta.text
        self._logprobs[delta.index] += sum(token.logprob for token in delta.logprobs or [])

    def whole(self) -> Response:
        """Prompts with completions, the likeliest first."""
        order = sorted(range(len(self._texts)), key=lambda i: self._logprobs[i], reverse=True)
        return json_response({"text": [self._prefix + self._texts[i] for i in order]})
