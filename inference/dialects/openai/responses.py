"""POST /v1/responses on top of chat completions. Responses are not stored."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import msgspec

from inference.dialects.openai import chat
from inference.dialects.openai.message import Message
from inference.dialects.openai.request_ids import name_request
from inference.dialects.openai.response_items import OutputItems
from inference.dialects.openai.responses_schema import ResponsesRequest, as_chat, name_field
from inference.dialects.openai.responses_tools import ToolNames
from inference.dialects.openai.streams import HEADERS, KEEP_ALIVE
from inference.errors import InvalidRequest, NotServed, ResponseNotFound, TemplateError
from inference.generation.answer import Job, Reply, StreamFormat, answer, preparing
from inference.http.exchange import json_response
from inference.http.validation import check_range, lenient
from inference.vendors.openai_errors import render_event
from inference.vendors.openai_logprobs import Context, LogprobTexts
from inference.vendors.responses_errors import failure

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from inference.dialects.openai.response_items import Event, Logprobs
    from inference.errors import ServingError
    from inference.generation.deltas import Delta
    from inference.generation.generation import Generation
    from inference.http.exchange import Exchange, Response
    from inference.services import Services

STREAM = StreamFormat(HEADERS, render_event, keep_alive=KEEP_ALIVE)


async def create(exchange: Exchange, services: Services) -> None:
    """POST /v1/responses."""
    with services.admission.permit(exchange.permit_holder):
        body = await exchange.work(lenient, await exchange.json(), ResponsesRequest)
        name_request(exchange, body.request_id)
        check_range("top_logprobs", body.top_logprobs, 0, services.limits.max_logprobs)
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
    """Renders one response. A whole one has reasoning, then text, then calls; a stream has them in the model's order."""

    def __init__(self, body: ResponsesRequest, message: Message, generation: Generation, request_id: str) -> None:
        self.body, self.message, self.generation = body, message, generation
        self.id = request_id if request_id == body.request_id else f"resp_{request_id}"
        self.created = int(time.time())
        self.finish: str | None = None
        self.reasoning_tokens = 0
        self._items = OutputItems(request_id, ToolNames(body.tools))
        self._text: list[str] = []
        self._token_ids: list[int] = []
        self._logprobs: Logprobs = []
        """Those of a whole answer, or those of a stream's tokens whose text is held back."""
        self._texts = LogprobTexts(generation.target.tokenizer, as_ids=False)
        self._context = Context(generation.prompt_token_ids)
        self._sequence = 0
        self._begun = False

    def add(self, delta: Delta) -> None:
        pieces, logprobs = self._read(delta)
        self._text += [piece["content"] for piece in pieces if "content" in piece]
        self._logprobs += logprobs

    def chunks(self, delta: Delta) -> Iterable[bytes]:
        """The events of what the delta adds."""
        pieces, logprobs = self._read(delta)
        yield from self._beginning()  # not earlier: an error before the first token is still an ordinary response
        self._logprobs += logprobs
        for kind, fields in self._written(pieces):
            yield self._event(kind, **fields)

    def last_chunks(self) -> Iterable[bytes]:
        """The end of the last item, and the whole response."""
        for kind, fields in self._ended():
            yield self._event(kind, **fields)
        response = self._response(self._status, self._items.done)
        yield self._event(response["status"], response=response)

    def whole(self) -> Response:
        reasoning, text, calls = self.message.reasoning, "".join(self._text), self.message.calls
        for _ in self._written([{"reasoning": reasoning}, {"content": text}, {"tool_calls": calls}]):
            pass
        for _ in self._ended():
            pass
        return json_response(self._response(self._status, self._items.done))

    def error_chunk(self, error: ServingError) -> bytes:
        """An error as an event of this response, which has begun before it."""
        failed = {**self._response("failed", []), "error": failure(error)}
        return b"".join(self._beginning()) + self._event("failed", response=failed)

    def _beginning(self) -> Iterator[bytes]:
        """The first two events, once."""
        if not self._begun:
            self._begun = True
            yield self._event("created", response=self._response("in_progress", []))
            yield self._event("in_progress", response=self._response("in_progress", []))

    def _read(self, delta: Delta) -> tuple[list[dict[str, Any]], Logprobs]:
        """The pieces of a chat's message that the delta adds, and the log-probabilities of its text."""
        self.finish = delta.finish_reason or self.finish
        self._token_ids += delta.token_ids
        pieces = self.message.pieces(delta.text, delta.finish_reason is not None)
        if self.message.reasons:
            self.reasoning_tokens += len(delta.token_ids)
        own = not self.message.reasons and not any("tool_calls" in piece for piece in pieces)
        if not self.body.shows_logprobs or not delta.logprobs or not own:
            for token in delta.token_ids:
                self._context.add(token)
            return pieces, []
        top = self.body.top_logprobs or 0
        return pieces, self._texts.chat(delta.logprobs, top, self._context, actual_first=True)["content"]

    def _written(self, pieces: list[dict[str, Any]]) -> Iterator[Event]:
        for piece in pieces:
            if piece.get("reasoning"):
                yield from self._items.reasoning(piece["reasoning"])
            if piece.get("content"):
                held, self._logprobs = self._logprobs, []
                yield from self._items.text(piece["content"], held)
            for call in piece.get("tool_calls", ()):
                function = call["function"]
                yield from self._items.call(call.get("id"), function.get("name"), function["arguments"])

    def _ended(self) -> Iterator[Event]:
        # A response has at least an empty text; to an open one belong the tokens without text.
        if self._items.empty or self._items.writes_text:
            yield from self._items.text("", self._logprobs)
        yield from self._items.close(self._status)

    @property
    def _status(self) -> str:
        return "incomplete" if self.finish == "length" else "completed"

    def _response(self, status: str, output: list[dict[str, Any]]) -> dict[str, Any]:
        body, params = self.body, self.generation.params
        ended = status in ("completed", "incomplete")
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
            "temperature": params.temperature,
            "tool_choice": body.tool_choice or ("auto" if body.tools else "none"),
            "tools": body.tools or [],
            "top_p": params.top_p,
            "presence_penalty": params.presence_penalty,
            "frequency_penalty": params.frequency_penalty,
            "background": False,
            "max_output_tokens": params.max_tokens,
            "max_tool_calls": body.max_tool_calls,
            "previous_response_id": None,
            "prompt": None,
            "prompt_cache_key": body.prompt_cache_key,
            "prompt_cache_options": body.prompt_cache_options,
            "prompt_cache_retention": body.prompt_cache_retention,
            "reasoning": body.reasoning,
            "safety_identifier": body.safety_identifier,
            "service_tier": body.service_tier or "auto",
            "text": body.text or {"format": {"type": "text"}},
            "top_logprobs": params.logprobs,
            "truncation": body.truncation or "disabled",
            "usage": self._usage() if ended else None,
            "user": body.user,
            **(self._messages() if ended and body.enable_response_messages else {}),
        }

    def _usage(self) -> dict[str, Any]:
        counts = self.generation.usage
        return {
            "input_tokens": counts.prompt_tokens,
            "input_tokens_details": {
                "cached_tokens": counts.cached_tokens,
                "cache_write_tokens": counts.prompt_tokens - counts.cached_tokens,
            },
            "output_tokens": counts.completion_tokens,
            "output_tokens_details": {"reasoning_tokens": self.reasoning_tokens},
            "total_tokens": counts.prompt_tokens + counts.completion_tokens,
        }

    def _messages(self) -> dict[str, Any]:
        """What the model read and wrote, special tokens included."""
        decode = self.generation.target.tokenizer.decode
        read, written = (
            [{"type": "raw_message_tokens", "message": decode(ids), "tokens": ids}]
            for ids in (self.generation.prompt_token_ids, self._token_ids)
        )
        return {"input_messages": read, "output_messages": written}

    def _event(self, kind: str, **fields: Any) -> bytes:
        name = f"response.{kind}"
        value = {"type": name, "sequence_number": self._sequence, **fields}
        self._sequence += 1
        return f"event: {name}\ndata: ".encode() + msgspec.json.encode(value) + b"\n\n"
