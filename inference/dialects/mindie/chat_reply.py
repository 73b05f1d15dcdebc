"""The response to a chat request: one object, or chunks of one choice each, with `usage` in every choice's last."""

from __future__ import annotations

import secrets
import string
import time
from typing import TYPE_CHECKING, Any

from inference.chat.answer_parser import AnswerParser
from inference.dialects.mindie.openai_parameters import usage
from inference.generation.answer import Reply
from inference.http.exchange import Response, json_response
from inference.http.sse import event
from inference.vendors.openai_logprobs import Context, LogprobTexts

if TYPE_CHECKING:
    from engine.messages import TokenLogprob
    from inference.chat.tool_calls import CallPart
    from inference.chat.tools import Choice, Tools
    from inference.dialects.mindie.clocks import Clock
    from inference.dialects.mindie.settings import MindieSettings
    from inference.generation.deltas import Delta
    from inference.generation.generation import Generation

ALPHANUMERIC = string.ascii_letters + string.digits


class ChatChoice:
    """The state of one sequence."""

    def __init__(self, parser: AnswerParser, context: Context) -> None:
        self.parser, self.context = parser, context
        self.reasoning, self.content = "", ""
        self.calls: list[dict[str, Any]] = []
        self.logprobs: list[TokenLogprob] = []
        self.unsent: list[TokenLogprob] = []
        self.tokens = self.reasoning_tokens = 0
        self.finish: str | None = None

    @property
    def cumulative_logprob(self) -> float:
        """Choices are sorted by it."""
        return sum(token.logprob for token in self.logprobs)

    def add(self, delta: Delta) -> list[dict[str, Any]]:
        """Add a delta; returns the keys of its chunks."""
        ended = delta.finish_reason is not None
        part = self.parser.feed(delta.text, ended)
        self.tokens += len(delta.token_ids)
        self.logprobs += delta.logprobs or []
        self.reasoning += part.reasoning
        self.reasoning_tokens += len(delta.token_ids) if part.reasons else 0
        self.content += part.content
        keys: dict[str, Any] = {}
        if part.reasoning:
            keys["reasoning_content"] = part.reasoning
        if part.content:
            keys["content"] = part.content
        entries = [entry for call in part.calls for entry in self._call(call)]
        chunks = [keys] if keys else []
        chunks += [{"tool_calls": [entry]} for entry in entries]
        if ended:
            self.finish = "tool_calls" if self.calls and delta.finish_reason == "stop" else delta.finish_reason
        return chunks

    def _call(self, part: CallPart) -> list[dict[str, Any]]:
        """The deltas of a call: first its name, then its arguments."""
        entries: list[dict[str, Any]] = []
        if part.name is not None:
            call_id = "call_" + "".join(secrets.choice(ALPHANUMERIC) for _ in range(8))
            self.calls.append({"type": "function", "id": call_id, "function": {"name": part.name, "arguments": ""}})
            name = {"name": part.name}
            entries.append({"id": call_id, "type": "function", "index": part.index, "function": name})
        if part.arguments:
            self.calls[part.index]["function"]["arguments"] += part.arguments
            entries.append({"index": part.index, "function": {"arguments": part.arguments}})
        return entries


class ChatReply(Reply):
    """All sequences of a conversation."""

    def __init__(
        self,
        generation: Generation,
        clock: Clock,
        request_id: str,
        model: str,
        settings: MindieSettings,
        tools: Tools,
        choice: Choice,
        top_logprobs: int | None,
        *,
        whole: bool,
    ) -> None:
        """`whole`: the answer is not streamed."""
        self._generation, self._clock, self._settings = generation, clock, settings
        self._id, self._model, self._top_logprobs = request_id, model, top_logprobs
        tokenizer = generation.target.tokenizer
        self._texts = LogprobTexts(tokenizer, as_ids=False)
        prompt = generation.prompt_token_ids
        self._choices = [
            ChatChoice(AnswerParser(tokenizer, prompt, tools, choice, whole), Context(prompt))
            for _ in range(generation.request.n)
        ]
        self._begun = False

    def chunks(self, delta: Delta) -> list[bytes]:
        """First an empty chunk for every choice; then the new parts, with usage at the end of a choice."""
        frames = []
        if not self._begun:
            self._begun = True
            frames += [self._chunk(i, {}, None) for i in range(len(self._choices))]
        choice = self._choices[delta.index]
        chunks = choice.add(delta)
        if self._settings.full_text_enabled and chunks and "content" in chunks[0]:
            chunks[0]["content"] = choice.content
        choice.unsent += delta.logprobs or []
        if delta.finish_reason is None and not chunks:
            return frames
        logprobs, choice.unsent = self._logprobs(choice.unsent, choice), []
        last = chunks.pop() if chunks else {}
        frames += [self._chunk(delta.index, keys, None) for keys in chunks]
        return [*frames, self._chunk(delta.index, last, logprobs, None if delta.finish_reason is None else choice)]

    def add(self, delta: Delta) -> None:
        self._choices[delta.index].add(delta)

    def whole(self) -> Response:
        """The complete response, the likeliest choice first."""
        order = self._choices
        if len(order) > 1:
            order = sorted(order, key=lambda choice: choice.cumulative_logprob, reverse=True)
        tokens = sum(choice.tokens for choice in order)
        reasoning = sum(choice.reasoning_tokens for choice in order)
        value = {
            "id": self._id,
            "object": "chat.completion",
            "created": int(time.time()),
            "model": self._model,
            "choices": [self._choice(index, choice) for index, choice in enumerate(order)],
            "usage": usage(self._generation, tokens, self._clock, self._settings.benchmark_enabled, reasoning),
        }
        if self._settings.benchmark_enabled:
            value["prefill_time"] = self._clock.first_ms
            value["decode_time_arr"] = self._clock.decodes
        return json_response(value)

    def _choice(self, index: int, choice: ChatChoice) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": choice.content}
        if choice.reasoning:
            message["reasoning_content"] = choice.reasoning
        message["tool_calls"] = choice.calls
        return {
            "index": index,
            "message": message,
            "logprobs": self._logprobs(choice.logprobs, choice),
            "finish_reason": choice.finish,
        }

    def _chunk(self, index: int, keys: dict[str, Any], logprobs: Any, ended: ChatChoice | None = None) -> bytes:
        delta = {"role": "assistant", **(keys or {"content": ""})}
        chunk: dict[str, Any] = {
            "id": self._id,
            "object": "chat.completion.chunk",
            "created": int(time.time()),
            "model": self._model,
        }
        if ended is not None:
            if self._settings.full_text_enabled:
                chunk["full_text"] = ended.content
            chunk["usage"] = usage(
                self._generation, ended.tokens, self._clock, self._settings.benchmark_enabled, ended.reasoning_tokens
            )
        finish = None if ended is None else ended.finish
        chunk["choices"] = [{"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish}]
        return event(chunk)

    def _logprobs(self, logprobs: list[TokenLogprob], choice: ChatChoice) -> dict[str, Any] | None:
        if self._top_logprobs is None:
            return None
        return self._texts.chat(logprobs, self._top_logprobs, choice.context)
