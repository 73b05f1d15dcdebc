"""POST .../generate and .../generate_stream: the same inference in plain JSON."""

from __future__ import annotations

from contextlib import aclosing
from typing import TYPE_CHECKING, Any

from inference.dialects.triton import errors
from inference.dialects.triton.infer import Inference, Prepared, prepare
from inference.dialects.triton.tensors import Tensor
from inference.errors import InvalidRequest
from inference.http.exchange import json_response
from inference.http.sse import event

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

    from inference.http.exchange import Exchange, Headers
    from inference.services import Services

HEADERS: Headers = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache")]
KEEP_ALIVE = b": keep-alive\n\n"
ONE_ANSWER = (
    "generate expects model to produce exactly 1 response, use generate stream for model that generates various "
    "number of responses"
)


async def generate(exchange: Exchange, services: Services) -> None:
    """One answer."""
    with services.admission.place(exchange.tenant):
        prepared = await _prepare(exchange, services)
        if prepared.streams:
            raise InvalidRequest(ONE_ANSWER, "stream")
        tensors = await exchange.unless_gone(prepared.whole())
        await exchange.respond(json_response(_told(prepared, tensors)))


async def generate_stream(exchange: Exchange, services: Services) -> None:
    """One frame for each step, and no [DONE]."""
    with services.admission.place(exchange.tenant):
        prepared = await _prepare(exchange, services)
        await exchange.stream(
            _frames(prepared), headers=HEADERS, render_error=errors.render_event, keep_alive=KEEP_ALIVE
        )


async def _frames(prepared: Prepared) -> AsyncGenerator[bytes, None]:
    async with aclosing(prepared.steps()) as steps:
        async for tensors, _ in steps:
            yield event(_told(prepared, tensors))


async def _prepare(exchange: Exchange, services: Services) -> Prepared:
    body = await exchange.json()
    request_id = body.pop("id", "")
    if not isinstance(request_id, str):
        raise InvalidRequest("id must be a string", "id")
    text = body.pop("text_input", None)
    if isinstance(text, list) and len(text) == 1:
        text = text[0]
    if not isinstance(text, str):
        raise InvalidRequest("text_input must be a string", "text_input")
    parameters = body.pop("parameters", None) or {}
    if not isinstance(parameters, dict):
        raise InvalidRequest("parameters must be an object", "parameters")
    flat = {name: value[0] if isinstance(value, list) and len(value) == 1 else value for name, value in body.items()}
    path = exchange.parameters
    inference = Inference(
        model=path["model"],
        version=path.get("version", ""),
        request_id=request_id,
        parameters={**flat, **parameters},
        inputs=[Tensor("text_input", "BYTES", [1], [text])],
    )
    if inference.parameters.get("details"):
        inference.parameters.setdefault("return_finish_reason", True)
        inference.parameters.setdefault("return_logprobs", True)
    return await prepare(inference, services, exchange)


def _told(prepared: Prepared, tensors: list[Tensor]) -> dict[str, Any]:
    """Outputs of one element as that element, longer ones as lists."""
    inference = prepared.inference
    answer: dict[str, Any] = {"id": inference.request_id} if inference.request_id else {}
    answer["model_name"] = inference.model
    answer["model_version"] = str(prepared.generation.target.entry.version)
    for tensor in tensors:
        answer[tensor.name] = tensor.values[0] if len(tensor.values) == 1 else tensor.values
    return answer
