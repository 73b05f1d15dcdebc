"""POST .../generate and .../generate_stream: inference in plain JSON."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from inference.dialects.triton import errors
from inference.dialects.triton.infer import Inference, Prepared, prepare
from inference.dialects.triton.model import find
from inference.dialects.triton.tensors import Tensor
from inference.errors import InvalidRequest
from inference.generation.answer import Job, Reply, StreamFormat, answer
from inference.generation.answer import prepared as ready
from inference.http.exchange import json_response
from inference.http.sse import event

if TYPE_CHECKING:
    from engine.messages import TokenLogprob
    from inference.generation.deltas import Delta
    from inference.http.exchange import Exchange, Headers, Response
    from inference.services import Services

HEADERS: Headers = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache")]
STREAM = StreamFormat(HEADERS, errors.render_event, keep_alive=b": keep-alive\n\n")
INPUTS = ("text_input", "stream")
"""Tensors of the model. Other names are parameters, of which the last counts."""
LISTS = ("guided_choice",)
"""Parameters that are lists also where they have one element."""
ONE_ANSWER = (
    "generate expects model to produce exactly 1 response, use generate stream for model that generates various "
    "number of responses"
)


async def generate(exchange: Exchange, services: Services) -> None:
    """POST .../generate: one response."""
    with services.admission.permit(exchange.permit_holder):
        prepared = await _prepare(exchange, services)
        if prepared.streams:
            raise InvalidRequest(ONE_ANSWER, "stream")
        await answer(exchange, _job(prepared, None))


async def generate_stream(exchange: Exchange, services: Services) -> None:
    """POST .../generate_stream: one frame per step, or one in all if `stream` is false; without a final [DONE]."""
    with services.admission.permit(exchange.permit_holder):
        await answer(exchange, _job(await _prepare(exchange, services, stepwise=True), STREAM))


def _job(inference: Prepared, stream: StreamFormat | None) -> Job:
    return Job(ready([inference.generation]), lambda _: GenerateReply(inference), stream)


class GenerateReply(Reply):
    """Outputs of one element are rendered as that element, longer ones as lists."""

    def __init__(self, prepared: Prepared) -> None:
        self._prepared = prepared

    def chunks(self, delta: Delta) -> list[bytes]:
        if not self._prepared.parameters.flag("stream", True):
            self.add(delta)
            return []
        return [event(self._value(self._prepared.outputs.step(delta), delta))]

    def last_chunks(self) -> list[bytes]:
        return (
            []
            if self._prepared.parameters.flag("stream", True)
            else [event(self._value(self._prepared.outputs.whole()))]
        )

    def add(self, delta: Delta) -> None:
        self._prepared.outputs.add(delta)

    def whole(self) -> Response:
        return json_response(self._value(self._prepared.outputs.whole()))

    def _value(self, tensors: list[Tensor], step: Delta | None = None) -> dict[str, Any]:
        inference = self._prepared.inference
        value: dict[str, Any] = {"id": inference.request_id} if inference.request_id else {}
        value["model_name"], value["model_version"] = inference.model, self._prepared.version
        for tensor in tensors:
            value[tensor.name] = tensor.values[0] if len(tensor.values) == 1 else tensor.values
        if self._prepared.parameters.flag("details"):
            value["details"] = self._details(step)
        return value

    def _details(self, step: Delta | None) -> dict[str, Any]:
        """KServe's details of the first sequence, or of the sequence of a step: the reason, once known, and the tokens."""
        piece = self._prepared.outputs.pieces[0 if step is None else step.index]
        details: dict[str, Any] = {}
        if piece.finish is not None:
            stopped = "eos_token" if piece.ended_by_eos else "stop_sequence"
            details["finish_reason"] = "length" if piece.finish == "length" else stopped
        tokens = [self._token(token) for token in piece.logprobs]
        if step is not None and tokens:
            details["token"] = tokens[-1]
        return {**details, "logprobs": tokens}

    def _token(self, token: TokenLogprob) -> dict[str, Any]:
        tokenizer = self._prepared.generation.target.tokenizer
        return {
            "id": token.token_id,
            "text": tokenizer.token_text(token.token_id),
            "logprob": token.logprob,
            "special": token.token_id in tokenizer.special_ids,
        }


async def _prepare(exchange: Exchange, services: Services, *, stepwise: bool = False) -> Prepared:
    path = exchange.parameters
    find(services.router, path["model"], path.get("version", ""))  # an unknown model is said before a wrong body
    body = dict(await exchange.json())
    await exchange.work(_check_once, await exchange.body())
    request_id = body.pop("id", "")
    if not isinstance(request_id, str):
        raise InvalidRequest("id must be a string", "id")
    text = body.pop("text_input", None)
    if isinstance(text, list) and len(text) == 1:
        text = text[0]
    if not isinstance(text, str):
        raise InvalidRequest("text_input must be a string: attempt to access JSON non-string as string", "text_input")
    parameters = body.pop("parameters", None) or {}
    if not isinstance(parameters, dict):
        raise InvalidRequest("Expected JSON object for keyword: 'parameters'", "parameters")
    flat = {name: _element(value) if name not in LISTS else value for name, value in body.items()}
    if not isinstance(flat.get("stream"), bool | None):
        raise InvalidRequest("stream must be a boolean: attempt to access JSON non-boolean as boolean", "stream")
    inference = Inference(
        model=path["model"],
        version=path.get("version", ""),
        request_id=request_id,
        parameters={**flat, **parameters},
        inputs=[Tensor("text_input", "BYTES", [1], [text])],
    )
    return await prepare(inference, services, exchange, stepwise=stepwise)


def _element(value: Any) -> Any:
    """The element of a list of one, as tensors of one element are written."""
    return value[0] if isinstance(value, list) and len(value) == 1 else value


def _check_once(body: bytes) -> None:
    """Raise InvalidRequest if the object of a valid JSON text has an input twice."""
    if all(body.count(b'"%s"' % name.encode()) < 2 for name in INPUTS):
        return
    pairs: list[tuple[str, Any]] = json.loads(body, object_pairs_hook=list)
    names = [name for name, _ in pairs]
    twice = next((name for name in INPUTS if names.count(name) > 1), None)
    if twice is not None:
        raise InvalidRequest(f"input '{twice}' already exists in request", twice)
