"""POST /vertex: Vertex AI's form of the router, with several instances in one body and one text for each."""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import msgspec

from inference.chat.conversation import parse_messages
from inference.dialects.tgi.errors import invalid, undeserialisable
from inference.dialects.tgi.generate import counted_permit
from inference.dialects.tgi.schema import (
    GenerateParameters,
    GenerateRequest,
    chat_prompt,
    generation_request,
    grammar_of,
    parse,
    validate,
    validate_length,
)
from inference.errors import InvalidRequest
from inference.generation.answer import Job, WholeReply, answer
from inference.generation.requests import TextPrompt, TokenPrompt
from inference.http.exchange import json_response
from inference.http.validation import convert

if TYPE_CHECKING:
    from inference.generation.deltas import Delta
    from inference.generation.generation import Generation
    from inference.generation.requests import Prompt
    from inference.http.exchange import Exchange, Response
    from inference.services import Services


CONVERSATION = "-"
"""Stands for the `inputs` of an instance with messages."""


class VertexRequest(msgspec.Struct):
    """Instances with `inputs`, whose only parameters are max_new_tokens and seed, or with the fields of `ChatInstance`."""

    instances: list[dict[str, Any]]


class ChatInstance(msgspec.Struct):
    """A conversation, with what the router takes from a chat request. Only a grammar shapes the text: a call of a tool would
    have no place in it.
    """

    messages: list[dict[str, Any]]
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    frequency_penalty: float | None = None
    stop: list[str] | str | None = None
    seed: int | None = None
    response_format: dict[str, Any] | None = None
    tools: list[Any] | None = None

    @property
    def parameters(self) -> dict[str, Any]:
        """As parameters of /generate: greedy with a temperature of 0, else sampled."""
        given = {
            "max_new_tokens": self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens,
            "temperature": self.temperature or None,
            "top_p": self.top_p,
            "frequency_penalty": self.frequency_penalty,
            "stop": [self.stop] if isinstance(self.stop, str) else self.stop or [],
            "seed": self.seed,
            "grammar": self.response_format,
        }
        return {**given, "do_sample": self.temperature != 0}


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
    target = services.router.resolve(None)
    total, request = target.info.max_model_len, await exchange.work(_request_of, instance)
    validate(request, services.limits, total, streaming=False)
    prompt: Prompt = TextPrompt(request.inputs)
    if "messages" in instance:
        prompt = chat_prompt(await exchange.work(parse_messages, instance["messages"]))
    ids = await target.tokenizer.encode(prompt, limit=total)
    validate_length(ids, request.parameters, total)
    grammar = grammar_of(request.parameters.grammar)
    internal = generation_request(request, TokenPrompt(ids), grammar, with_tokens=False)
    return await services.generator.prepare(replace(internal, number=number, token_texts=False), exchange, "tgi")


def _request_of(instance: dict[str, Any]) -> GenerateRequest:
    """The instance as a request of /generate; raises the router's error."""
    if "messages" not in instance:
        given = {key: value for key, value in instance.items() if value is not None or key != "parameters"}
        request: GenerateRequest = parse(given, GenerateRequest)
        p = request.parameters
        request.parameters = GenerateParameters(do_sample=True, max_new_tokens=p.max_new_tokens, seed=p.seed)
        return request
    try:
        chat: ChatInstance = convert(instance, ChatInstance)
    except InvalidRequest as error:
        raise undeserialisable(InvalidRequest(f"instances.{error.message}", "instances")) from error
    if chat.tools:
        raise invalid("`tools` are not supported in instances", "instances")
    made: GenerateRequest = parse({"inputs": CONVERSATION, "parameters": chat.parameters}, GenerateRequest)
    return made
