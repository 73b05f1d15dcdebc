"""MindIE's TGI dialect: POST /generate with `inputs`, POST /generate_stream, POST /."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from inference.dialects.mindie.answer import counted
from inference.dialects.mindie.errors import invalid
from inference.dialects.mindie.fields import INT32_MAX, Fields
from inference.dialects.mindie.finish import finish_reason
from inference.dialects.mindie.parameters import Sampling, TextErrors, stop_strings, text_of
from inference.dialects.mindie.requests import Form, InferenceRequest, MessageType
from inference.generation.answer import Reply
from inference.generation.requests import TextPrompt
from inference.http.exchange import Response, json_response
from inference.http.sse import event

if TYPE_CHECKING:
    from inference.dialects.mindie.answer import Incoming
    from inference.dialects.mindie.clocks import Clock
    from inference.dialects.mindie.settings import MindieSettings
    from inference.dialects.mindie.state import MindieState
    from inference.generation.deltas import Delta
    from inference.generation.generation import Generation
    from inference.http.exchange import Exchange
    from inference.services import Services

DEFAULT_MAX_NEW_TOKENS = 20
ADAPTER_ID = re.compile(r"[a-zA-Z0-9_./-]{1,256}")
WRONG = TextErrors(
    missing="Request should contain 'inputs' and the type should be string.",
    empty="Inputs arr is empty",
    type="The type of inputs is abnormal",
    length="Inputs length must be in (0, {limit}], but got {length}",
)


async def generate_stream(exchange: Exchange, services: Services, state: MindieState) -> None:
    """POST /generate_stream: always a stream."""
    with counted(exchange, services, state) as incoming:
        await _run(incoming, await incoming.body(), MessageType.TGI, stream=True)


async def compat(exchange: Exchange, services: Services, state: MindieState) -> None:
    """POST /: a stream if requested, else a list with one result."""
    with counted(exchange, services, state) as incoming:
        body = await incoming.body("Failed to parse context to json body")
        stream = body.get("stream")
        if stream is not None and not isinstance(stream, bool):
            raise invalid("Stream must be boolean type.")
        await _run(incoming, body, MessageType.GENERAL_TGI, stream=bool(stream))


async def generate(incoming: Incoming, body: dict[str, Any]) -> None:
    """POST /generate with TGI's body (`inputs`): never a stream."""
    await _run(incoming, body, MessageType.TGI, stream=False)


async def _run(incoming: Incoming, body: dict[str, Any], kind: MessageType, *, stream: bool) -> None:
    exchange, state = incoming.exchange, incoming.state
    state.check_accepting(incoming.services)
    prompt = await exchange.work(text_of, body.get("inputs"), state.settings, WRONG)
    request = await exchange.work(_parse, Fields(body), prompt, state, kind, stream)
    await incoming.answer(request, state.new_id(exchange))


def _parse(body: Fields, prompt: str, state: MindieState, kind: MessageType, stream: bool) -> InferenceRequest:
    """Parse the parameters in MindIE's order, which decides which error is reported."""
    given = body.object("parameters")
    sampling = Sampling(stop=stop_strings(given, limited=True))
    sampling.temperature = given.positive_temperature()
    sampling.top_k = given.top_k(1)
    sampling.top_p = given.top_p(open_high=True)
    given.typical_p()
    sampling.do_sample = given.boolean("do_sample")
    sampling.seed = given.seed()
    sampling.repetition_penalty = given.repetition_penalty()
    given.boolean("watermark")
    adapter_id = given.string("adapter_id")
    if adapter_id is not None and not ADAPTER_ID.fullmatch(adapter_id):
        raise invalid("The format of adapter_id is invalid.")
    max_new_tokens = given.positive("max_new_tokens")
    details = bool(given.boolean("details"))
    prefill = bool(given.boolean("decoder_input_details"))
    if prefill and stream:
        raise invalid("The decoder_input_details must not be true when stream is true.")
    full_text = bool(given.boolean("return_full_text"))
    truncate = given.integer("truncate", 1, refusal=f"truncate must be in (0,{INT32_MAX}], got {{}}.")

    form = Form(kind=kind, stream=stream, text=prompt, details=details, prefill=prefill, full_text=full_text)
    return InferenceRequest(
        target=state.lenient(adapter_id),
        prompt=TextPrompt(prompt),
        sampling=sampling,
        max_tokens=DEFAULT_MAX_NEW_TOKENS if max_new_tokens is None else max_new_tokens,
        form=form,
        make_reply=make_reply,
        truncate=truncate,
    )


def make_reply(form: Form, settings: MindieSettings, generation: Generation, clock: Clock) -> Reply:
    """The reply of this form."""
    return TgiReply(
        generation,
        f"{form.text} " if form.full_text else "",
        details=form.details,
        prefill=form.prefill,
        as_list=form.kind is MessageType.GENERAL_TGI,
        cumulative=settings.full_text_enabled,
    )


class TgiReply(Reply):
    """One sequence in this dialect's format: ids without texts or log-probabilities."""

    def __init__(
        self, generation: Generation, before: str, *, details: bool, prefill: bool, as_list: bool, cumulative: bool
    ) -> None:
        self._generation, self._before = generation, before
        self._details, self._prefill, self._as_list, self._cumulative = details, prefill, as_list, cumulative
        self._texts: list[str] = []
        self._ids: list[int] = []
        self._finish = ""

    def chunks(self, delta: Delta) -> list[bytes]:
        """One frame; the last one has the whole text."""
        self.add(delta)
        ended = delta.finish_reason is not None
        text = "".join(self._texts) if self._cumulative else delta.text
        return [
            event(
                {
                    "token": {"id": delta.token_ids, "text": text, "logprob": None, "special": None},
                    "generated_text": self._text if ended else None,
                    "details": self._stream_details() if ended and self._details else None,
                }
            )
        ]

    def add(self, delta: Delta) -> None:
        self._texts.append(delta.text)
        self._ids += delta.token_ids
        if delta.finish_reason is not None:
            self._finish = finish_reason(delta)

    def whole(self) -> Response:
        """`generated_text`, after `details` if requested."""
        value: dict[str, Any] = {}
        if self._details or self._prefill:
            details = self._stream_details()
            seed = details.pop("seed")
            prompt = self._generation.prompt_token_ids if self._prefill else []
            details.update(prefill=_tokens(prompt), seed=seed, tokens=_tokens(self._ids))
            value["details"] = details
        value["generated_text"] = self._text
        return json_response([value] if self._as_list else value)

    @property
    def _text(self) -> str:
        return self._before + "".join(self._texts)

    def _stream_details(self) -> dict[str, Any]:
        return {
            "prompt_tokens": self._generation.usage.prompt_tokens,
            "finish_reason": self._finish,
            "generated_tokens": len(self._ids),
            "seed": self._generation.params.seed,
        }


def _tokens(ids: list[int]) -> list[dict[str, Any]]:
    return [{"id": i, "logprob": None, "special": None, "text": None} for i in ids]
