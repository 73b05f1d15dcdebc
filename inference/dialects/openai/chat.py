"""POST /v1/chat/completions: messages rendered by the model's chat template, responses whole or streamed."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from inference.chat.call_grammar import with_calls
from inference.chat.conversation import parse_messages, template_arguments
from inference.chat.tools import check_tools, may_call, tool_grammar
from inference.dialects.openai import schema, tgi_clients
from inference.dialects.openai.kv_transfer import answered
from inference.dialects.openai.load import load_headers
from inference.dialects.openai.message import Message
from inference.dialects.openai.request_ids import name_request
from inference.dialects.openai.schema import ChatCompletionRequest
from inference.dialects.openai.streams import STREAM
from inference.dialects.openai.usage import running_usage, usage
from inference.errors import InvalidRequest, NotServed
from inference.generation.answer import Job, Reply, answer, preparing
from inference.generation.deltas import by_token, joined
from inference.generation.requests import ChatPrompt
from inference.http.exchange import json_response
from inference.http.offload import encoded
from inference.http.sse import event
from inference.http.validation import check_range, lenient
from inference.vendors.openai_logprobs import Context, LogprobTexts

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    import msgspec

    from inference.generation.deltas import Delta
    from inference.generation.generation import Generation
    from inference.generation.requests import GenerationRequest, GrammarRequest
    from inference.http.exchange import Exchange, Response
    from inference.services import Limits, Services
    from inference.workers.target import Target


async def create(exchange: Exchange, services: Services) -> None:
    """POST /v1/chat/completions."""
    with services.admission.permit(exchange.permit_holder):
        body = await exchange.work(lenient, await exchange.json(), ChatCompletionRequest)
        name_request(exchange, body.request_id)
        request = await parse(body, exchange, services)

        def reply(generations: list[Generation]) -> ChatReply:
            return ChatReply(body, generations[0], exchange, services)

        stream = STREAM if body.stream else None
        await answer(exchange, Job(preparing([request], exchange, services, "openai"), reply, stream))


async def parse(body: ChatCompletionRequest, exchange: Exchange, services: Services) -> GenerationRequest:
    """Validate the body; returns the GenerationRequest."""
    grammar = await exchange.work(check, body, services.limits)
    target = services.router.resolve(body.model)
    return await exchange.work(_request, body, target, grammar, exchange.header("x-session-id"))


def _request(
    body: ChatCompletionRequest, target: Target, grammar: GrammarRequest | None, session: str | None
) -> GenerationRequest:
    logprobs = (body.top_logprobs or 0) if body.logprobs else None
    if body.response_format is not None:  # unlike vLLM's structured_outputs, which are the whole answer
        parallel = body.parallel_tool_calls is not False
        grammar = with_calls(grammar, body.tools, body.tool_choice, parallel, target.tokenizer)
    return schema.generation_request(
        body,
        parse_prompt(body),
        schema.sampling(body, logprobs, target.tokenizer),
        target.info.max_model_len,
        max_tokens=body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens,
        grammar=grammar,
        # Skipping special tokens would lose the tag of a tool call.
        skip_special_tokens=not (may_call(body.tools, body.tool_choice) and target.tokenizer.tool_tag_is_special),
        session=session,
        prompt_field="messages",
    )


def check(body: ChatCompletionRequest, limits: Limits) -> GrammarRequest | None:
    """Checks specific to this route.

    Returns the grammar of the response: a forced tool call's, else the body's.
    """
    grammar = schema.check(body, limits)
    check_range("max_tokens", body.max_tokens, 1, 1 << 31)
    check_range("max_completion_tokens", body.max_completion_tokens, 1, 1 << 31)
    check_range("top_logprobs", body.top_logprobs, 0, limits.max_logprobs)
    if body.top_logprobs and not body.logprobs:
        raise InvalidRequest("top_logprobs needs `logprobs` to be true.", "top_logprobs")
    if body.logprob_token_ids is not None and not body.logprobs:
        raise InvalidRequest("when using `logprob_token_ids`, `logprobs` must be set to true.", "logprob_token_ids")
    check_tools(body.tools, body.tool_choice)
    forced = tool_grammar(body.tools, body.tool_choice, body.parallel_tool_calls is not False)
    if body.modalities is not None and body.modalities != ["text"]:
        raise NotServed("modalities: only ['text'] is supported by this server.", "modalities")
    if body.add_generation_prompt and body.continue_final_message:
        raise InvalidRequest(
            "Cannot set both `continue_final_message` and `add_generation_prompt` to True.", "add_generation_prompt"
        )
    return forced or grammar


def parse_prompt(body: ChatCompletionRequest) -> ChatPrompt:
    """The conversation as the template gets it. Raises InvalidRequest or NotServed."""
    messages = parse_messages(body.messages)
    arguments = template_arguments(body.chat_template_kwargs)
    if body.tools:
        arguments["tools"] = body.tools
    if body.reasoning_effort is not None:
        arguments["reasoning_effort"] = body.reasoning_effort
        # Templates that know only a switch, as vLLM gives it to them.
        arguments.setdefault("enable_thinking", body.reasoning_effort != "none")
    if body.documents:
        arguments["documents"] = body.documents
    continued = bool(body.continue_final_message) or tgi_clients.continues(body, messages)
    return ChatPrompt(
        messages,
        add_generation_prompt=not continued and body.add_generation_prompt is not False,
        continue_final_message=continued,
        add_special_tokens=bool(body.add_special_tokens),
        template_arguments=arguments,
    )


class ChatReply(Reply):
    """The response to one chat request."""

    def __init__(
        self, body: ChatCompletionRequest, generation: Generation, exchange: Exchange, services: Services
    ) -> None:
        self.body, self.generation, self._exchange = body, generation, exchange
        self.fingerprint, self._shows_cached = services.fingerprint, services.shown.cached_tokens
        self.texts = LogprobTexts(generation.target.tokenizer, bool(body.return_tokens_as_token_ids))
        self.id, self.created = f"chatcmpl-{exchange.request_id}", int(time.time())
        self.model = body.model or generation.target.entry.name
        self.messages = [Message(body, generation) for _ in range(generation.request.n)]
        self._deltas: list[list[Delta]] = [[] for _ in range(generation.request.n)]
        self._completion_tokens = [0] * generation.request.n
        self._contexts = [Context(generation.prompt_token_ids) for _ in range(generation.request.n)]
        self._begun = False
        self._as_tgi = tgi_clients.streams(body)

    def chunks(self, delta: Delta) -> Iterable[bytes]:
        """Role chunks first, then content chunks."""
        if (
            not self._begun and not self._as_tgi
        ):  # not earlier: an error before the first token is still an ordinary response
            self._begun = True
            for index in range(self.generation.request.n):
                yield event(self._role_chunk(index))
        for part in by_token(delta) if self._as_tgi else [delta]:
            yield from self._content(part)

    def _content(self, delta: Delta) -> Iterable[bytes]:
        message, ended = self.messages[delta.index], delta.finish_reason is not None
        tokens = self.body.return_token_ids and not message.hides_tokens
        self._completion_tokens[delta.index] += len(delta.token_ids)
        keys = message.delta(delta.text, ended)
        shown = tokens or (self.body.logprobs and not message.hides_tokens)
        if not keys and not ended and not shown:
            return
        if self._as_tgi:
            keys = tgi_clients.delta(keys, message.calls, ended)
        choice = {
            "index": delta.index,
            "delta": keys or {"content": ""},
            "logprobs": self._logprobs(delta),
            "finish_reason": message.finish_reason(delta.finish_reason),
        }
        if ended:
            choice["stop_reason"] = delta.stop_reason
        if tokens:
            choice["token_ids"] = delta.token_ids
        yield event(self._chunk([choice], **self._running(delta.index)))

    def last_chunks(self) -> Iterable[bytes]:
        """Usage, if requested."""
        if self.body.include_usage:
            yield event(self._chunk([], usage=self._usage()))

    def add(self, delta: Delta) -> None:
        """Keep the delta; the message is built from all deltas at once."""
        self._deltas[delta.index].append(delta)

    def whole(self) -> Response:
        value = self.answer(self.choices(), self._usage())
        return json_response(value, headers=load_headers(self._exchange, self.generation.target))

    def choices(self) -> Iterator[dict[str, Any]]:
        """The choices of the whole response."""
        return (self._choice(joined(sequence)) for sequence in self._deltas)

    def answer(self, choices: Iterable[dict[str, Any]], counted: dict[str, Any]) -> dict[str, Any]:
        """The body of a whole response with these choices and this usage."""
        asked = self.body.prompt_logprobs is not None
        return {
            "id": self.id,
            "object": "chat.completion",
            "created": self.created,
            "model": self.model,
            "choices": encoded(choices, 1),
            "service_tier": None,
            "system_fingerprint": self.fingerprint,
            "usage": counted,
            "prompt_logprobs": self._prompt_logprobs() if asked else None,
            "prompt_token_ids": self.generation.prompt_token_ids if self.body.return_token_ids else None,
            "kv_transfer_params": answered(self.generation),
        }

    def _prompt_logprobs(self) -> msgspec.Raw:
        return self.texts.prompt(self.generation.prompt_token_ids, self.generation.prompt_logprobs)

    def _choice(self, delta: Delta) -> dict[str, Any]:
        message = self.messages[delta.index]
        message.delta(delta.text, ended=True)
        return {
            "index": delta.index,
            "message": message.whole(self._echoed()),
            "logprobs": self._logprobs(delta),
            "finish_reason": message.finish_reason(delta.finish_reason),
            "stop_reason": delta.stop_reason,
            "token_ids": delta.token_ids if self.body.return_token_ids and not message.hides_tokens else None,
        }

    def _chunk(self, choices: list[dict[str, Any]], **extra: Any) -> dict[str, Any]:
        chunk = {"id": self.id, "object": "chat.completion.chunk", "created": self.created, "model": self.model,
                 "choices": choices, **extra}  # fmt: skip
        if self._as_tgi:
            chunk["system_fingerprint"] = self.fingerprint
        return chunk

    def _running(self, index: int) -> dict[str, Any]:
        """The usage of one choice so far, if every chunk has one."""
        if not self.body.continuous_usage:
            return {}
        return {"usage": running_usage(self.generation.usage.prompt_tokens, self._completion_tokens[index])}

    def _role_chunk(self, index: int) -> dict[str, Any]:
        delta = {"role": "assistant", "content": self._echoed()}
        choice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}
        extra: dict[str, Any] = {}
        if self.body.return_token_ids:
            extra["prompt_token_ids"] = self.generation.prompt_token_ids
        return self._chunk([choice], **extra, **self._running(index))

    def _logprobs(self, delta: Delta) -> dict[str, Any] | None:
        if not self.body.logprobs or delta.logprobs is None or self.messages[delta.index].hides_tokens:
            return None
        named = self.body.logprob_token_ids
        top = (self.body.top_logprobs or 0) if named is None else len(named) + 1
        return self.texts.chat(delta.logprobs, top, self._contexts[delta.index], actual_first=True)

    def _echoed(self) -> str:
        """`echo` repeats the last message if the response continues it."""
        prompt = self.generation.request.prompt
        if not self.body.echo or not isinstance(prompt, ChatPrompt) or prompt.messages[-1]["role"] != "assistant":
            return ""
        content: str = prompt.messages[-1]["content"]
        return content

    def _usage(self) -> dict[str, Any]:
        counts = self.generation.usage
        cached = counts.cached_tokens if self._shows_cached else None
        return usage(counts.prompt_tokens, counts.completion_tokens, cached)
