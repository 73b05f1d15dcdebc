"""POST /v1/chat/completions/batch: several conversations in one body, one choice for each, never streamed."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from inference.dialects.openai import chat
from inference.dialects.openai.chat import ChatReply
from inference.dialects.openai.load import load_headers
from inference.dialects.openai.request_ids import name_request
from inference.dialects.openai.schema import BatchChatCompletionRequest, ChatCompletionRequest, ChatFields
from inference.dialects.openai.usage import usage
from inference.errors import InvalidRequest, NotServed, TemplateError
from inference.generation.answer import Job, WholeReply, answer
from inference.http.exchange import json_response
from inference.http.validation import check_count, lenient

if TYPE_CHECKING:
    from collections.abc import Iterable

    from inference.generation.deltas import Delta
    from inference.generation.generation import Generation
    from inference.generation.requests import GenerationRequest
    from inference.http.exchange import Exchange, Response
    from inference.services import Services

NOT_SERVED = {"stream": "Streaming", "tools": "Tool use", "use_beam_search": "Beam search"}
FIELDS = [name for name in ChatFields.__struct_fields__ if name != "messages"]


async def create(exchange: Exchange, services: Services) -> None:
    """POST /v1/chat/completions/batch."""
    with services.admission.permit(exchange.permit_holder):
        body = await exchange.work(lenient, await exchange.json(), BatchChatCompletionRequest)
        name_request(exchange, body.request_id)
        bodies = await exchange.work(conversations, body, services.limits.max_prompts)
        requests: list[GenerationRequest] = []
        for number, one in enumerate(bodies):
            try:
                requests.append(replace(await chat.parse(one, exchange, services), number=number))
            except (InvalidRequest, NotServed) as error:
                _name_conversation(error, number)
                raise

        async def prepare() -> list[Generation]:
            generations = []
            for request in requests:
                try:
                    generations.append(await services.generator.prepare(request, exchange, "openai"))
                except (InvalidRequest, TemplateError) as error:
                    _name_conversation(error, request.number)
                    raise
            return generations

        def reply(generations: list[Generation]) -> BatchReply:
            return BatchReply(bodies, generations, exchange, services)

        await answer(exchange, Job(prepare, reply))


def conversations(body: BatchChatCompletionRequest, limit: int) -> list[ChatCompletionRequest]:
    """The chat request of each conversation; raises InvalidRequest or NotServed."""
    for name, words in NOT_SERVED.items():
        if getattr(body, name):
            raise NotServed(f"{words} is not supported for batches of conversations.", name)
    if body.n not in (None, 1):
        raise InvalidRequest("n must be 1 or absent for batches of conversations.", "n")
    if not body.messages:
        raise InvalidRequest("messages must be a non-empty list of conversations.", "messages")
    check_count("messages", body.messages, limit)
    fields = {name: getattr(body, name) for name in FIELDS}
    return [ChatCompletionRequest(**fields, messages=messages) for messages in body.messages]


def _name_conversation(error: InvalidRequest | NotServed | TemplateError, number: int) -> None:
    name = f"messages[{number}]"
    if error.field is not None and re.match(r"messages\b", error.field):
        error.field = name + error.field.removeprefix("messages")
        error.message = re.sub(r"^messages\b", name, error.message)


class BatchReply(WholeReply):
    """One choice for each conversation."""

    def __init__(
        self,
        bodies: list[ChatCompletionRequest],
        generations: list[Generation],
        exchange: Exchange,
        services: Services,
    ) -> None:
        pairs = zip(bodies, generations, strict=True)
        self._replies = [ChatReply(body, generation, exchange, services) for body, generation in pairs]
        self._exchange, self._shows_cached = exchange, services.shown.cached_tokens

    def add(self, delta: Delta) -> None:
        self._replies[delta.prompt].add(delta)

    def whole(self) -> Response:
        counts = [reply.generation.usage for reply in self._replies]
        cached = sum(c.cached_tokens for c in counts) if self._shows_cached else None
        counted = usage(sum(c.prompt_tokens for c in counts), sum(c.completion_tokens for c in counts), cached)
        choices: Iterable[dict[str, Any]] = (
            {**choice, "index": index} for index, reply in enumerate(self._replies) for choice in reply.choices()
        )
        # What belongs to one prompt has no place in an answer to several.
        value = {**self._replies[0].answer(choices, counted), "prompt_logprobs": None, "prompt_token_ids": None}
        return json_response(value, headers=load_headers(self._exchange, self._replies[0].generation.target))
