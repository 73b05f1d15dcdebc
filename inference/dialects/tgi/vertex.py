"""POST /vertex: Vertex AI's form of the router, with several instances in one body and one text for each."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import msgspec

from inference.chat.conversation import parse_messages
from inference.dialects.tgi.errors import invalid, undeserialisable
from inference.dialects.tgi.generate import counted_permit
from inference.dialects.tgi.schema import GenerateParameters, GenerateRequest, chat_prompt, parse
from inference.errors import InvalidRequest
from inference.generation.answer import Job, WholeReply, answer
from inference.generation.requests import GenerationRequest, SamplingOverrides, TextPrompt, TokenPrompt
from inference.http.exchange import json_response
from inference.http.validation import convert

if TYPE_CHECKING:
    from inference.generation.deltas import Delta
    from inference.generation.generation import Generation
    from inference.http.exchange import Exchange, Response
    from inference.services import Services


class VertexRequest(msgspec.Struct):
    """Instances with `inputs`, whose only parameters are max_new_tokens and seed, or with `messages`."""

    instances: list[dict[str, Any]]


async def predict(exchange: Exchange, services: Services) -> None:
    """Handle POST /vertex."""
    try:
        body = await exchange.work(convert, await exchange.json(), VertexRequest)
    except InvalidRequest as error:
        raise undeserialisable(error) from error
    if not body.instances:
        raise invalid("`instances` cannot be empty", "instances")
    if len(body.instances) > services.limits.max_prompts:
        limit = services.limits.max_prompts
        raise invalid(f"`instances` supports up to {limit} entries. Given: {len(body.instances)}", "instances")

    async def prepare() -> list[Generation]:
        return [await _prepare(exchange, services, number, instance) for number, instance in enumerate(body.instances)]

    def permit() -> AbstractContextManager[None]:
        return counted_permit(exchange, services)

    await answer(exchange, Job(prepare, lambda generations: PredictionReply(len(generations)), permit=permit))


class PredictionReply(WholeReply):
    """One text for each instance."""

    def __init__(self, instances: int) -> None:
        self._texts = [""] * instances

    def add(self, delta: Delta) -> None:
        self._texts[delta.prompt] += delta.text

    def whole(self) -> Response:
        return json_response({"predictions": self._texts})


async def _prepare(exchange: Exchange, services: Services, number: int, instance: dict[str, Any]) -> Generation:
    tokenizer = services.router.resolve(None).tokenizer
    if "messages" in instance:
        messages = instance["messages"]
        if not isinstance(messages, list) or not all(isinstance(m, dict) for m in messages):
            raise undeserialisable(InvalidRequest("instances.messages: expected a list of objects", "instances"))
        ids = await tokenizer.encode(chat_prompt(await exchange.work(parse_messages, messages)))
        parameters = GenerateParameters(
            max_new_tokens=_whole(instance.get("max_tokens")), seed=_whole(instance.get("seed"))
        )
    else:
        given = {key: value for key, value in instance.items() if value is not None or key != "parameters"}
        request: GenerateRequest = parse(given, GenerateRequest)
        if not request.inputs:
            raise invalid("`inputs` cannot be empty", "inputs")
        longest = services.router.resolve(None).info.max_model_len
        ids, parameters = await tokenizer.encode(TextPrompt(request.inputs), limit=longest), request.parameters
    internal = GenerationRequest(
        model=None,
        prompt=TokenPrompt(ids),
        sampling=SamplingOverrides(temperature=1.0),
        max_tokens=parameters.max_new_tokens,
        seed=parameters.seed,
        use_model_defaults=False,
        number=number,
    )
    return await services.generator.prepare(internal, exchange, "tgi")


def _whole(value: Any) -> int | None:
    if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 0):
        raise undeserialisable(InvalidRequest("instances: expected an unsigned integer", "instances"))
    number: int | None = value
    return number
