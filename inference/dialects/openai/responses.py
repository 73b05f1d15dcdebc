"""POST /v1/responses: a chat told as output items. Nothing is kept, so no response can be asked for again."""

from __future__ import annotations

import time
from contextlib import aclosing
from typing import TYPE_CHECKING, Any

import msgspec

from inference.dialects.openai import chat
from inference.dialects.openai.message import Message
from inference.dialects.openai.responses_schema import ResponsesRequest, as_chat
from inference.dialects.openai.streams import HEADERS, KEEP_ALIVE
from inference.errors import ResponseNotFound
from inference.http.exchange import json_response
from inference.http.validation import convert
from inference.vendors.openai_errors import body as error_body
from inference.vendors.openai_logprobs import LogprobTexts

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

    from inference.errors import ServingError
    from inference.generation.deltas import Delta
    from inference.generation.generate import Generation
    from inference.http.exchange import Exchange
    from inference.services import Services


async def create(exchange: Exchange, services: Services) -> None:
    """The route's handler."""
    with services.admission.place(exchange.tenant):
        body = await exchange.work(convert, await exchange.json(), ResponsesRequest)
        request = await exchange.work(as_chat, body)
        generation = await chat.prepare(request, exchange, services)
        answer = ResponseAnswer(body, Message(request, generation), generation, exchange.request_id)
        if body.stream:
            await exchange.stream(
                answer.events(), headers=HEADERS, render_error=answer.render_error, keep_alive=KEEP_ALIVE
            )
        else:
            await exchange.unless_gone(answer.collect())
            await exchange.respond(json_response(answer.whole()))


async def retrieve(exchange: Exchange, services: Services) -> None:
    """GET /v1/responses/{id} and POST .../cancel."""
    raise ResponseNotFound(exchange.parameters["id"])


class ResponseAnswer:
    """One response as it grows: thoughts, then text, then function calls, each an output item."""

    def __init__(self, body: ResponsesRequest, message: Message, generation: Generation, request_id: str) -> None:
        self.body, self.message, self.generation = body, message, generation
        self.id, self.message_id, self.reasoning_id = (f"{kind}_{request_id}" for kind in ("resp", "msg", "rs"))
        self.created = int(time.time())
        self.finish: str | None = None
        self.text = ""
        self.logprobs: list[dict[str, Any]] = []
        self.reasoning_tokens = 0
        self._texts = LogprobTexts(generation.target.tokenizer, as_ids=False)
        self._sequence = 0

    async def collect(self) -> None:
        """Everything at once."""
        async with aclosing(self.generation.deltas()) as deltas:
            async for delta in deltas:
                self._add(delta)

    async def events(self) -> AsyncGenerator[bytes, None]:
        """The stream: thoughts' and text's events as they come, and function calls, whole, behind them."""
        begun = thinking = writing = False
        async with aclosing(self.generation.deltas()) as deltas:
            async for delta in deltas:
                thoughts, text, logprobs = self._add(delta)
                if not begun:  # not earlier: what fails before the first token is still an ordinary answer
                    begun = True
                    yield self._event("response.created", response=self._response("in_progress", []))
                    yield self._event("response.in_progress", response=self._response("in_progress", []))
                if thoughts:
                    if not thinking:
                        thinking = True
                        yield self._item_event("added", 0, self._reasoning_item("in_progress", ""))
                    place = {"item_id": self.reasoning_id, "output_index": 0, "content_index": 0}
                    yield self._event("response.reasoning_text.delta", **place, delta=thoughts)
                if text:
                    if not writing:
                        writing = True
                        for event in self._begin_text():
                            yield event
                    yield self._text_event("response.output_text.delta", delta=text, logprobs=logprobs)
        for event in self._end(writing):
            yield event

    def _begin_text(self) -> list[bytes]:
        """What comes before the text, and ends the thoughts."""
        events = []
        if self.message.thoughts:
            events.append(self._item_event("done", 0, self._reasoning_item("completed", self.message.thoughts)))
        events.append(self._item_event("added", self._text_index, self._item("in_progress", [])))
        events.append(self._text_event("response.content_part.added", part=_part("", [])))
        return events

    def _end(self, written: bool) -> list[bytes]:
        """What comes behind the last token."""
        calls, events = self._calls(), []
        if not written and not calls:  # an answer has at least an empty text
            events += self._begin_text()
        elif not written and self.message.thoughts:
            events.append(self._item_event("done", 0, self._reasoning_item("completed", self.message.thoughts)))
        if written or not calls:
            events.append(self._text_event("response.output_text.done", text=self.text, logprobs=self.logprobs))
            events.append(self._text_event("response.content_part.done", part=_part(self.text, self.logprobs)))
            events.append(self._item_event("done", self._text_index, self._text_item()))
        for index, item in enumerate(calls, self._text_index + (written or not calls)):
            place = {"output_index": index, "item_id": item["id"]}
            events.append(self._item_event("added", index, {**item, "arguments": "", "status": "in_progress"}))
            events.append(self._event("response.function_call_arguments.delta", **place, delta=item["arguments"]))
            events.append(self._event("response.function_call_arguments.done", **place, arguments=item["arguments"]))
            events.append(self._item_event("done", index, item))
        whole = self.whole()
        return [*events, self._event(f"response.{whole['status']}", response=whole)]

    def whole(self) -> dict[str, Any]:
        """The complete answer."""
        calls, thoughts = self._calls(), self.message.thoughts
        items = [self._reasoning_item("completed", thoughts)] if thoughts else []
        if self.text or not calls:
            items.append(self._text_item())
        return self._response("incomplete" if self.finish == "length" else "completed", [*items, *calls])

    def render_error(self, error: ServingError) -> bytes:
        """A failure after the head."""
        told = error_body(error)[1]["error"]
        response = {**self._response("failed", []), "error": told}
        return self._event("response.failed", response=response)

    @property
    def _text_index(self) -> int:
        return 1 if self.message.thoughts else 0

    def _add(self, delta: Delta) -> tuple[str, str, list[dict[str, Any]]]:
        """Thoughts, text and the text's log-probabilities of a delta."""
        self.finish = delta.finish_reason or self.finish
        keys = self.message.delta(delta.text, delta.finish_reason is not None)
        thoughts, text = keys.get("reasoning", ""), keys.get("content", "")
        if thoughts:
            self.reasoning_tokens += len(delta.token_ids)
        logprobs: list[dict[str, Any]] = []
        if self.body.top_logprobs is not None and delta.logprobs and not thoughts:
            logprobs = self._texts.chat(delta.logprobs, self.body.top_logprobs)["content"]
        self.text += text
        self.logprobs += logprobs
        return thoughts, text, logprobs

    def _text_item(self) -> dict[str, Any]:
        status = "incomplete" if self.finish == "length" else "completed"
        return self._item(status, [_part(self.text, self.logprobs)])

    def _item(self, status: str, content: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": self.message_id,
            "type": "message",
            "role": "assistant",
            "status": status,
            "content": content,
        }

    def _calls(self) -> list[dict[str, Any]]:
        return [
            {
                "type": "function_call",
                "id": f"fc_{call['id']}",
                "call_id": call["id"],
                "name": call["function"]["name"],
                "arguments": call["function"]["arguments"],
                "status": "completed",
            }
            for call in self.message.calls
        ]

    def _response(self, status: str, output: list[dict[str, Any]]) -> dict[str, Any]:
        body, counts = self.body, self.generation.usage
        usage = {
            "input_tokens": counts.prompt_tokens,
            "input_tokens_details": {"cached_tokens": counts.cached_tokens},
            "output_tokens": counts.completion_tokens,
            "output_tokens_details": {"reasoning_tokens": self.reasoning_tokens},
            "total_tokens": counts.prompt_tokens + counts.completion_tokens,
        }
        return {
            "id": self.id,
            "created_at": self.created,
            "object": "response",
            "status": status,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "instructions": body.instructions,
            "metadata": body.metadata or {},
            "model": body.model or self.generation.target.entry.name,
            "output": output,
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "temperature": body.temperature,
            "tool_choice": body.tool_choice or "auto",
            "tools": body.tools or [],
            "top_p": body.top_p,
            "background": False,
            "max_output_tokens": body.max_output_tokens,
            "max_tool_calls": body.max_tool_calls,
            "previous_response_id": None,
            "prompt": None,
            "reasoning": body.reasoning,
            "service_tier": body.service_tier or "auto",
            "text": body.text or {"format": {"type": "text"}},
            "top_logprobs": body.top_logprobs,
            "truncation": body.truncation or "disabled",
            "usage": usage if status not in ("in_progress", "failed") else None,
            "user": body.user,
        }

    def _reasoning_item(self, status: str, thoughts: str) -> dict[str, Any]:
        content = [{"type": "reasoning_text", "text": thoughts}] if thoughts else []
        return {"id": self.reasoning_id, "type": "reasoning", "summary": [], "content": content, "status": status}

    def _item_event(self, change: str, index: int, item: dict[str, Any]) -> bytes:
        return self._event(f"response.output_item.{change}", output_index=index, item=item)

    def _text_event(self, kind: str, **fields: Any) -> bytes:
        place = {"item_id": self.message_id, "output_index": self._text_index, "content_index": 0}
        return self._event(kind, **place, **fields)

    def _event(self, kind: str, **fields: Any) -> bytes:
        value = {"type": kind, "sequence_number": self._sequence, **fields}
        self._sequence += 1
        return f"event: {kind}\ndata: ".encode() + msgspec.json.encode(value) + b"\n\n"


def _part(text: str, logprobs: list[dict[str, Any]]) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}
