"""MindIE's TGI dialect: POST /generate with `inputs`, POST /generate_stream, POST /."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from inference.dialects.mindie.answer import InferenceRequest, answer, body_of, counted
from inference.dialects.mindie.errors import invalid
from inference.dialects.mindie.fields import INT32_MAX, Fields
from inference.dialects.mindie.finish import finish_reason
from inference.dialects.mindie.parameters import MAX_STOP_LENGTH, Sampling, TextErrors, stop_strings, text_of
from inference.generation.answer import Reply
from inference.generation.requests import TextPrompt
from inference.http.exchange import Response, json_response
from inference.http.sse import event

if TYPE_CHECKING:
    from inference.dialects.mindie.answer import Clock
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
    with counted(exchange, services, state):
        await _run(exchange, services, state, await body_of(exchange, state), stream=True, as_list=False)


async def compat(exchange: Exchange, services: Services, state: MindieState) -> None:
    """POST /: a stream if requested, else a list with one result."""
    with counted(exchange, services, state):
        body = await body_of(exchange, state, "Failed to parse context to json body")
        stream = body.get("stream")
        if stream is not None and not isinstance(stream, bool):
            raise invalid("Stream must be boolean type.")
        await _run(exchange, services, state, body, stream=bool(stream), as_list=True)


async def generate(exchange: Exchange, services: Services, state: MindieState, body: dict[str, Any]) -> None:
    """POST /generate with TGI's body (`inputs`): never a stream."""
    await _run(exchange, services, state, body, stream=False, as_list=False)


async def _run(
    exchange: Exchange, services: Services, state: MindieState, body: dict[str, Any], *, stream: bool, as_list: bool
) -> None:
    state.check_accepting(services)
    prompt = await exchange.work(text_of, body.get("inputs"), state.settings, WRONG)
    request = await exchange.work(_parse, Fields(body), prompt, state, stream, as_list)
    await answer(exchange, services, state, request, state.new_id(exchange))


def _parse(body: Fields, prompt: str, state: MindieState, stream: bool, as_list: bool) -> InferenceRequest:
    """Parse the parameters in MindIE's order, which decides which error is reported."""
    given = body.object("parameters")
    sampling = Sampling(stop=stop_strings(given, MAX_STOP_LENGTH))
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

    def reply(generation: Generation, clock: Clock) -> TgiReply:
        before = f"{prompt} " if full_text else ""
        return TgiReply(
            generation, before, details=details, prefill=prefill, as_list=as_list, cumulative=state.settings.full_text_enabled
        )  # fmt: skip

    return InferenceRequest(
        target=state.lenient(adapter_id),
        prompt=TextPrompt(prompt),
        sampling=sampling,
        max_tokens=DEFAULT_MAX_NEW_TOKENS if max_new_tokens is None else max_new_tokens,
        reply=reply,
        stream=stream,
        truncate=truncate,
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
