"""POST /v1/responses on top of chat completions. Responses are not stored."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import msgspec

from inference.dialects.openai import chat
from inference.dialects.openai.message import Message
from inference.dialects.openai.request_ids import name_request
from inference.dialects.openai.responses_schema import ResponsesRequest, as_chat, name_field
from inference.dialects.openai.streams import HEADERS, KEEP_ALIVE
from inference.errors import InvalidRequest, NotServed, ResponseNotFound, TemplateError
from inference.generation.answer import Job, Reply, StreamFormat, answer, preparing
from inference.http.exchange import json_response
from inference.http.validation import convert
from inference.vendors.openai_errors import body as error_body
from inference.vendors.openai_errors import render_event
from inference.vendors.openai_logprobs import LogprobTexts

if TYPE_CHECKING:
    from collections.abc import Iterable

    from inference.errors import ServingError
    from inference.generation.deltas import Delta
    from inference.generation.generation import Generation
    from inference.http.exchange import Exchange, Response
    from inference.services import Services

STREAM = StreamFormat(HEADERS, render_event, keep_alive=KEEP_ALIVE)


async def create(exchange: Exchange, services: Services) -> None:
    """POST /v1/responses."""
    with services.admission.permit(exchange.tenant):
        body = await exchange.work(convert, await exchange.json(), ResponsesRequest)
        name_request(exchange, body.request_id)
        chat_body = await exchange.work(as_chat, body)

        def reply(generations: list[Generation]) -> ResponseReply:
            return ResponseReply(body, Message(chat_body, generations[0]), generations[0], exchange.request_id)

        stream = STREAM if body.stream else None
        try:
            request = await chat.parse(chat_body, exchange, services)
            await answer(exchange, Job(preparing([request], exchange, services, "openai"), reply, stream))
        except (InvalidRequest, NotServed, TemplateError) as error:
            name_field(error)
            raise


async def retrieve(exchange: Exchange, services: Services) -> None:
    """GET /v1/responses/{id} and POST .../cancel."""
    raise ResponseNotFound(exchange.parameters["id"])


class ResponseReply(Reply):
    """Renders one response: reasoning, then text, then function calls, each an output item."""

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
        self._begun = self._reasoning = self._writing = False

    def add(self, delta: Delta) -> None:
        self._add(delta)

    def chunks(self, delta: Delta) -> Iterable[bytes]:
        """Events of reasoning and text, as they arrive."""
        reasoning, text, logprobs = self._add(delta)
        if not self._begun:  # not earlier: an error before the first token is still an ordinary response
            self._begun = True
            yield self._event("response.created", response=self._response("in_progress", []))
            yield self._event("response.in_progress", response=self._response("in_progress", []))
        if reasoning:
            if not self._reasoning:
                self._reasoning = True
                yield self._item_event("added", 0, self._reasoning_item("in_progress", ""))
            position = {"item_id": self.reasoning_id, "output_index": 0, "content_index": 0}
            yield self._event("response.reasoning_text.delta", **position, delta=reasoning)
        if text:
            if not self._writing:
                self._writing = True
                yield from self._begin_text()
            yield self._text_event("response.output_text.delta", delta=text, logprobs=logprobs)

    def last_chunks(self) -> Iterable[bytes]:
        """The end of the text, then each function call as a whole."""
        return self._end(self._writing)

    def _begin_text(self) -> list[bytes]:
        """The events before the text; they end the reasoning."""
        events = []
        if self.message.reasoning:
            events.append(self._item_event("done", 0, self._reasoning_item("completed", self.message.reasoning)))
        events.append(self._item_event("added", self._text_index, self._item("in_progress", [])))
        events.append(self._text_event("response.content_part.added", part=_part("", [])))
        return events

    def _end(self, written: bool) -> list[bytes]:
        """The events after the last token."""
        calls, events = self._calls(), []
        if not written and not calls:  # a response has at least an empty text
            events += self._begin_text()
        elif not written and self.message.reasoning:
            events.append(self._item_event("done", 0, self._reasoning_item("completed", self.message.reasoning)))
        if written or not calls:
            events.append(self._text_event("response.output_text.done", text=self.text, logprobs=self.logprobs))
            events.append(self._text_event("response.content_part.done", part=_part(self.text, self.logprobs)))
            events.append(self._item_event("done", self._text_index, self._text_item()))
        for index, item in enumerate(calls, self._text_index + (written or not calls)):
            position = {"output_index": index, "item_id": item["id"]}
            events.append(self._item_event("added", index, {**item, "arguments": "", "status": "in_progress"}))
            events.append(self._event("response.function_call_arguments.delta", **position, delta=item["arguments"]))
            events.append(self._event("response.function_call_arguments.done", **position, arguments=item["arguments"]))
            events.append(self._item_event("done", index, item))
        whole = self._whole()
        return [*events, self._event(f"response.{whole['status']}", response=whole)]

    def whole(self) -> Response:
        return json_response(self._whole())

    def _whole(self) -> dict[str, Any]:
        calls, reasoning = self._calls(), self.message.reasoning
        items = [self._reasoning_item("completed", reasoning)] if reasoning else []
        if self.text or not calls:
            items.append(self._text_item())
        return self._response("incomplete" if self.finish == "length" else "completed", [*items, *calls])

    def error_chunk(self, error: ServingError) -> bytes:
        """An error as an event of this response."""
        details = error_body(error)[1]["error"]
        response = {**self._response("failed", []), "error": details}
        return self._event("response.failed", response=response)

    @property
    def _text_index(self) -> int:
        return 1 if self.message.reasoning else 0

    def _add(self, delta: Delta) -> tuple[str, str, list[dict[str, Any]]]:
        """Add a delta; returns its reasoning, its text and the text's log-probabilities."""
        self.finish = delta.finish_reason or self.finish
        keys = self.message.delta(delta.text, delta.finish_reason is not None)
        reasoning, text = keys.get("reasoning", ""), keys.get("content", "")
        if reasoning:
            self.reasoning_tokens += len(delta.token_ids)
        logprobs: list[dict[str, Any]] = []
        if self.body.top_logprobs is not None and delta.logprobs and not reasoning:
            logprobs = self._texts.chat(delta.logprobs, self.body.top_logprobs)["content"]
        self.text += text
        self.logprobs += logprobs
        return reasoning, text, logprobs

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

    def _reasoning_item(self, status: str, reasoning: str) -> dict[str, Any]:
        content = [{"type": "reasoning_text", "text": reasoning}] if reasoning else []
        return {"id": self.reasoning_id, "type": "reasoning", "summary": [], "content": content, "status": status}

    def _item_event(self, change: str, index: int, item: dict[str, Any]) -> bytes:
        return self._event(f"response.output_item.{change}", output_index=index, item=item)

    def _text_event(self, kind: str, **fields: Any) -> bytes:
        position = {"item_id": self.message_id, "output_index": self._text_index, "content_index": 0}
        return self._event(kind, **position, **fields)

    def _event(self, kind: str, **fields: Any) -> bytes:
        value = {"type": kind, "sequence_number": self._sequence, **fields}
        self._sequence += 1
        return f"event: {kind}\ndata: ".encode() + msgspec.json.encode(value) + b"\n\n"


def _part(text: str, logprobs: list[dict[str, Any]]) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}
