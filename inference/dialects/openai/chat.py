"""POST /v1/chat/completions: messages through the model's own template, answers whole or streamed."""

from __future__ import annotations

import time
from contextlib import aclosing
from typing import TYPE_CHECKING, Any

from inference.chat.conversation import parse_messages, template_arguments
from inference.chat.tools import check_tools, may_call, tool_grammar
from inference.dialects.openai import schema
from inference.dialects.openai.completions import joined
from inference.dialects.openai.load import load_headers
from inference.dialects.openai.message import Message
from inference.dialects.openai.schema import ChatCompletionRequest
from inference.dialects.openai.streams import HEADERS, KEEP_ALIVE
from inference.dialects.openai.usage import usage
from inference.errors import InvalidRequest, NotServed
from inference.generation.requests import ChatPrompt
from inference.http.exchange import json_response
from inference.http.offload import beside_if, encoded
from inference.http.sse import DONE, event
from inference.http.validation import check_range, convert
from inference.vendors import openai_errors
from inference.vendors.openai_logprobs import LogprobTexts

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

    from engine.sampling.params import Grammar
    from inference.generation.deltas import Delta
    from inference.generation.generate import Generation
    from inference.generation.requests import GenerationRequest
    from inference.http.exchange import Exchange
    from inference.services import Limits, Services
    from inference.workers.router import Target


async def create(exchange: Exchange, services: Services) -> None:
    """The route's handler."""
    with services.admission.place(exchange.tenant):
        body = await exchange.work(convert, await exchange.json(), ChatCompletionRequest)
        generation = await prepare(body, exchange, services)
        chat = ChatCompletion(body, generation, exchange.request_id, services.fingerprint)
        if body.stream:
            await exchange.stream(
                chat.chunks(),
                headers=HEADERS,
                render_error=openai_errors.render_event,
                keep_alive=KEEP_ALIVE,
                end=DONE,
            )
        else:
            answer = await exchange.unless_gone(chat.whole())
            await exchange.respond(json_response(answer, headers=load_headers(exchange, generation.target)))


async def prepare(body: ChatCompletionRequest, exchange: Exchange, services: Services) -> Generation:
    """The body checked and its generation prepared."""
    await exchange.work(check, body, services.limits)
    target = services.router.resolve(body.model)
    request = await exchange.work(_request, body, target)
    return await services.generator.prepare(request, exchange, "openai")


def _request(body: ChatCompletionRequest, target: Target) -> GenerationRequest:
    max_tokens = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    logprobs = (body.top_logprobs or 0) if body.logprobs else None
    fields = schema.sampling(body, logprobs, target.tokenizer)
    forced = _tool_grammar(body)
    if forced is not None:
        fields["grammar"] = forced
    request = schema.generation_request(body, parse_prompt(body), max_tokens, fields, target.info.max_model_len)
    if forced is not None:
        request.grammar_field = "tools"
    if may_call(body.tools, body.tool_choice) and target.tokenizer.tool_mark_is_special:
        request.skip_special_tokens = False  # else the mark of a call would be lost
    return request


def check(body: ChatCompletionRequest, limits: Limits) -> None:
    """The rules of this route beside the common ones."""
    schema.check(body, limits)
    check_range("max_tokens", body.max_tokens, 1, 1 << 31)
    check_range("max_completion_tokens", body.max_completion_tokens, 1, 1 << 31)
    check_range("top_logprobs", body.top_logprobs, 0, limits.max_logprobs)
    if body.top_logprobs and not body.logprobs:
        raise InvalidRequest("top_logprobs needs `logprobs` to be true.", "top_logprobs")
    check_tools(body.tools, body.tool_choice)
    _tool_grammar(body)
    if body.modalities is not None and body.modalities != ["text"]:
        raise NotServed("modalities: only ['text'] is supported by this server.", "modalities")
    if body.add_generation_prompt and body.continue_final_message:
        raise InvalidRequest(
            "Cannot set both `continue_final_message` and `add_generation_prompt` to True.", "add_generation_prompt"
        )


def _tool_grammar(body: ChatCompletionRequest) -> Grammar | None:
    return tool_grammar(body.tools, body.tool_choice, body.parallel_tool_calls is not False)


def parse_prompt(body: ChatCompletionRequest) -> ChatPrompt:
    """Messages checked and their text parts joined; every other field of a message goes to the template as it is."""
    messages = parse_messages(body.messages)
    arguments = template_arguments(body.chat_template_kwargs)
    if body.tools:
        arguments["tools"] = body.tools
    if body.reasoning_effort is not None:
        arguments.setdefault("reasoning_effort", body.reasoning_effort)
    if body.documents:
        arguments["documents"] = body.documents
    continued = bool(body.continue_final_message)
    return ChatPrompt(
        messages,
        add_generation_prompt=not continued and body.add_generation_prompt is not False,
        continue_final_message=continued,
        add_special_tokens=bool(body.add_special_tokens),
        template_arguments=arguments,
    )


class ChatCompletion:
    """One chat request's answer."""

    def __init__(self, body: ChatCompletionRequest, generation: Generation, request_id: str, fingerprint: str) -> None:
        self.body, self.generation, self.fingerprint = body, generation, fingerprint
        self.texts = LogprobTexts(generation.target.tokenizer, bool(body.return_tokens_as_token_ids))
        self.id, self.created = f"chatcmpl-{request_id}", int(time.time())
        self.model = body.model or generation.target.entry.name
        self.messages = [Message(body, generation) for _ in range(generation.request.n)]

    async def chunks(self) -> AsyncGenerator[bytes, None]:
        """The stream's frames, without [DONE]: role chunks, content chunks, usage."""
        begun = False
        async with aclosing(self.generation.deltas()) as deltas:
            async for delta in deltas:
                if not begun:  # not earlier: what fails before the first token is still an ordinary answer
                    begun = True
                    for index in range(self.generation.request.n):
                        yield event(self._role_chunk(index))
                message, ended = self.messages[delta.index], delta.finish_reason is not None
                keys = message.delta(delta.text, ended)
                if not keys and not ended and not self.body.logprobs and not self.body.return_token_ids:
                    continue
                choice = {
                    "index": delta.index,
                    "delta": keys or {"content": ""},
                    "logprobs": self._logprobs(delta),
                    "finish_reason": message.finish_reason(delta.finish_reason),
                }
                if ended:
                    choice["stop_reason"] = delta.stop_reason
                if self.body.return_token_ids:
                    choice["token_ids"] = delta.token_ids
                yield event(self._chunk([choice]))
        if self.body.include_usage:
            yield event(self._chunk([], usage=self._usage()))

    async def whole(self) -> dict[str, Any]:
        """The complete answer."""
        parts: list[list[Delta]] = [[] for _ in range(self.generation.request.n)]
        async with aclosing(self.generation.deltas()) as deltas:
            async for delta in deltas:
                parts[delta.index].append(delta)
        return await beside_if(self.generation.heavy, self._whole, parts)

    def _whole(self, parts: list[list[Delta]]) -> dict[str, Any]:
        asked = self.body.prompt_logprobs is not None
        choices = encoded((self._choice(joined(sequence)) for sequence in parts), 1)
        return {
            "id": self.id,
            "object": "chat.completion",
            "created": self.created,
            "model": self.model,
            "choices": choices,
            "service_tier": None,
            "system_fingerprint": self.fingerprint,
            "usage": self._usage(),
            "prompt_logprobs": self.texts.prompt(self.generation.prompt_logprobs) if asked else None,
            "prompt_token_ids": self.generation.prompt_token_ids if self.body.return_token_ids else None,
            "kv_transfer_params": None,
        }

    def _choice(self, delta: Delta) -> dict[str, Any]:
        message = self.messages[delta.index]
        message.delta(delta.text, ended=True)
        return {
            "index": delta.index,
            "message": message.whole(self._echoed()),
            "logprobs": self._logprobs(delta),
            "finish_reason": message.finish_reason(delta.finish_reason),
            "stop_reason": delta.stop_reason,
            "token_ids": delta.token_ids if self.body.return_token_ids else None,
        }

    def _chunk(self, choices: list[dict[str, Any]], **extra: Any) -> dict[str, Any]:
        chunk = {"id": self.id, "object": "chat.completion.chunk", "created": self.created, "model": self.model,
                 "choices": choices, **extra}  # fmt: skip
        if self.body.continuous_usage:
            chunk.setdefault("usage", self._usage())
        return chunk

    def _role_chunk(self, index: int) -> dict[str, Any]:
        delta = {"role": "assistant", "content": self._echoed()}
        choice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}
        extra: dict[str, Any] = (
            {"prompt_token_ids": self.generation.prompt_token_ids} if self.body.return_token_ids else {}
        )
        if self.body.continuous_usage:
            extra["usage"] = usage(self.generation.usage.prompt_tokens, 0)
        return self._chunk([choice], **extra)

    def _logprobs(self, delta: Delta) -> dict[str, Any] | None:
        if not self.body.logprobs or delta.logprobs is None:
            return None
        named = self.body.logprob_token_ids
        return self.texts.chat(delta.logprobs, (self.body.top_logprobs or 0) if named is None else len(named))

    def _echoed(self) -> str:
        """`echo` repeats the last message where the answer continues it."""
        prompt = self.generation.request.prompt
        if not self.body.echo or not isinstance(prompt, ChatPrompt) or prompt.messages[-1]["role"] != "assistant":
            return ""
        return prompt.messages[-1]["content"] or ""

    def _usage(self) -> dict[str, Any]:
        counts = self.generation.usage
        return usage(counts.prompt_tokens, counts.completion_tokens)
