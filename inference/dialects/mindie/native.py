"""MindIE's own dialect: POST /infer and POST /infer_token, which both accept a text or token ids."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from inference.dialects.mindie.answer import counted
from inference.dialects.mindie.errors import invalid
from inference.dialects.mindie.fields import Fields
from inference.dialects.mindie.finish import finish_reason
from inference.dialects.mindie.parameters import Sampling, TextErrors, text_of
from inference.dialects.mindie.requests import Form, InferenceRequest, MessageType
from inference.dialects.mindie.tgi import DEFAULT_MAX_NEW_TOKENS
from inference.generation.answer import Reply
from inference.generation.requests import Prompt, TextPrompt, TokenPrompt
from inference.http.exchange import Response, json_response
from inference.http.sse import event
from inference.http.validation import in_range

if TYPE_CHECKING:
    from inference.dialects.mindie.clocks import Clock
    from inference.dialects.mindie.settings import MindieSettings
    from inference.dialects.mindie.state import MindieState
    from inference.generation.deltas import Delta
    from inference.generation.generation import Generation
    from inference.http.exchange import Exchange
    from inference.services import Services

MAX_TOKENS = 1 << 20
WRONG = TextErrors(
    missing="Inputs must not be null",
    empty="Inputs arr is empty",
    type="The type of inputs is abnormal",
    length="Inputs must be necessary and data type must be string and length in (0, {limit}], but the length of inputs is "
    "{length}",
)


async def infer(exchange: Exchange, services: Services, state: MindieState) -> None:
    """Handle POST /infer and POST /infer_token."""
    with counted(exchange, services, state) as incoming:
        body = await incoming.body()
        state.check_accepting(services)
        prompt = await exchange.work(_prompt, body, state)
        request = await exchange.work(_parse, Fields(body), prompt, state)
        await incoming.answer(request, state.new_id(exchange))


def _prompt(body: dict[str, Any], state: MindieState) -> Prompt:
    if "inputs" in body and "input_id" in body:
        raise invalid("Input conflict.")
    if "inputs" in body:
        return TextPrompt(text_of(body["inputs"], state.settings, WRONG))
    if "input_id" not in body:
        raise invalid("Not found inputs.")
    ids = body["input_id"]
    if ids is None:
        raise invalid("Input_id should not be empty")
    if not isinstance(ids, list):
        raise invalid("Parameter input_id must be an array")
    if not set(map(type, ids)) <= {int}:
        raise invalid("Parameter input_id must be integer")
    if not in_range(ids, MAX_TOKENS + 1):
        raise invalid("Data element in param input_id is invalid")
    if not 1 <= len(ids) <= MAX_TOKENS:
        raise invalid(f"Inputs token length must be in (0, {MAX_TOKENS}], but got {len(ids)}")
    return TokenPrompt(ids)


def _parse(body: Fields, prompt: Prompt, state: MindieState) -> InferenceRequest:
    """Parse the parameters in MindIE's order, which decides which error is reported."""
    given = body.object("parameters")
    sampling = Sampling(temperature=given.positive_temperature())
    sampling.top_k = given.top_k(1)
    sampling.top_p = given.top_p(open_high=True)
    given.typical_p()
    sampling.do_sample = given.boolean("do_sample")
    sampling.seed = given.seed()
    sampling.repetition_penalty = given.repetition_penalty()
    given.boolean("watermark")
    priority = given.priority()
    max_new_tokens = given.positive("max_new_tokens")
    timeout_s = given.timeout_s()
    details = bool(given.boolean("details"))
    stream = bool(body.boolean("stream"))
    return InferenceRequest(
        target=state.router.resolve(None),
        prompt=prompt,
        sampling=sampling,
        max_tokens=DEFAULT_MAX_NEW_TOKENS if max_new_tokens is None else max_new_tokens,
        form=Form(kind=MessageType.INFER, stream=stream, details=details),
        make_reply=make_reply,
        timeout_s=timeout_s,
        priority=priority,
    )


def make_reply(form: Form, settings: MindieSettings, generation: Generation, clock: Clock) -> Reply:
    """The reply of this form."""
    return NativeReply(generation, clock, form.details, settings.full_text_enabled)


class NativeReply(Reply):
    """One sequence in this dialect's format."""

    def __init__(self, generation: Generation, clock: Clock, details: bool, cumulative: bool) -> None:
        self._generation, self._clock, self._details, self._cumulative = generation, clock, details, cumulative
        self._texts: list[str] = []
        self._ids: list[int] = []
        self._finish = ""

    def chunks(self, delta: Delta) -> list[bytes]:
        """One frame; the last one's token has no text, which marks the end for clients."""
        self.add(delta)
        frame: dict[str, Any] = {"prefill_time": self._clock.prefill_ms, "decode_time": self._clock.decode_ms}
        ended = delta.finish_reason is not None
        text: str | None = "".join(self._texts) if self._cumulative else delta.text
        if ended:
            text = None
            frame["generated_text"] = "".join(self._texts)
            frame["details"] = self._render_details() if self._details else None
        frame["token"] = {"id": delta.token_ids, "text": text}
        return [event(frame)]

    def add(self, delta: Delta) -> None:
        self._texts.append(delta.text)
        self._ids += delta.token_ids
        if delta.finish_reason is not None:
            self._finish = finish_reason(delta)

    def whole(self) -> Response:
        """`generated_text`, and details with the ids."""
        value: dict[str, Any] = {"generated_text": "".join(self._texts)}
        if self._details:
            details = self._render_details()
            seed = details.pop("seed")
            value["details"] = {**details, "generated_token_ids": self._ids, "seed": seed}
        return json_response(value)

    def _render_details(self) -> dict[str, Any]:
        return {
            "finish_reason": self._finish,
            "generated_tokens": len(self._ids),
            "seed": self._generation.params.seed,
        }
