"""LMI's answers: one JSON document, or a stream with a line or an event for each token."""

from __future__ import annotations

from collections import deque
from operator import or_
from typing import TYPE_CHECKING, Any

import msgspec

from engine.failures import FinishReason
from inference.dialects.djl.errors import DEPENDENCY, render_inference
from inference.generation.answer import Reply, StreamFormat
from inference.http.exchange import json_response
from inference.http.offload import encoded
from inference.http.sse import event
from inference.vendors.openai_logprobs import floor

if TYPE_CHECKING:
    from inference.dialects.djl.lmi import Parsed
    from inference.errors import ServingError
    from inference.generation.deltas import Delta
    from inference.generation.generation import Generation
    from inference.http.exchange import Response


def line(value: Any) -> bytes:
    """One line of JSON."""
    return msgspec.json.encode(value) + b"\n"


def _render_error(error: ServingError) -> bytes:
    """An error before the first token of a stream whose head is sent: an object as in an ordinary error."""
    return render_inference(error).body + b"\n"


def _render_event(error: ServingError) -> bytes:
    return event(msgspec.json.decode(render_inference(error).body))


STREAMS = {
    "jsonlines": StreamFormat([(b"content-type", b"application/jsonlines")], _render_error),
    "sse": StreamFormat([(b"content-type", b"text/event-stream")], _render_event, keep_alive=b":\n\n"),
}


class LmiReply(Reply):
    """The answer to one request, which may have several inputs."""

    def __init__(self, parsed: Parsed, generations: list[Generation]) -> None:
        self._parsed = parsed
        self._write = event if parsed.form == "sse" else line
        self._sequences = [
            [Sequence(parsed, generation, index) for index in range(generation.request.n)] for generation in generations
        ]

    def chunks(self, delta: Delta) -> list[bytes]:
        """A line for each token; the last one has the whole text."""
        return [self._write(value) for value in self._sequences[delta.prompt][delta.index].lines(delta)]

    def add(self, delta: Delta) -> None:
        self._sequences[delta.prompt][delta.index].add(delta)

    def error_chunk(self, error: ServingError) -> bytes:
        """A last token without a text, with the error's text."""
        sequence = self._sequences[0][0]
        token = {"id": -1, "text": "", "log_prob": -1, "special_token": True, "error_msg": error.message}
        details = {"finish_reason": "error", "generated_tokens": len(sequence.tokens), "inputs": sequence.input}
        return self._write({"token": token, "generated_text": sequence.text, "details": details})

    def whole(self) -> Response:
        """An object, or a list with one for each input."""
        values = [self._value(sequences) for sequences in self._sequences]
        return json_response(values if self._parsed.as_list else values[0])

    def _value(self, sequences: list[Sequence]) -> dict[str, Any]:
        best, *others = sequences
        value: dict[str, Any] = {"generated_text": best.text}
        if not (self._parsed.parameters.details or others):
            return value
        if others and not self._parsed.parameters.num_beams:
            best, *others = sorted(sequences, key=lambda each: each.logprob, reverse=True)
        value = {"generated_text": best.text, "details": {"inputs": best.input, **best.details()}}
        if others:
            rest = [{**each.details(), "generated_text": each.text} for each in others]
            value["details"]["best_of_sequences"] = rest
        return value


class BatchReply(LmiReply):
    """The stream for a list of inputs: each line has the next token's text of every input, "" for those that have ended."""

    def __init__(self, parsed: Parsed, generations: list[Generation]) -> None:
        super().__init__(parsed, generations)
        self._waiting: list[deque[str]] = [deque() for _ in generations]
        """Texts of tokens for which another input has none yet."""
        self._ended = [False] * len(generations)

    def chunks(self, delta: Delta) -> list[bytes]:
        """The lines that are complete with this delta."""
        lines = self._sequences[delta.prompt][delta.index].lines(delta)
        self._waiting[delta.prompt] += [each["token"]["text"] for each in lines]
        self._ended[delta.prompt] = delta.finish_reason is not None
        chunks = []
        while any(self._waiting) and all(map(or_, map(bool, self._waiting), self._ended)):
            chunks.append(self._write({"outputs": [texts.popleft() if texts else "" for texts in self._waiting]}))
        return chunks

    def error_chunk(self, error: ServingError) -> bytes:
        """The last line."""
        return self._write({"error": error.message, "code": DEPENDENCY})


class Sequence:
    """One generated sequence."""

    def __init__(self, parsed: Parsed, generation: Generation, index: int) -> None:
        self._parameters, self._generation, self._index = parsed.parameters, generation, index
        self._streams = parsed.form != "json"
        self.input = parsed.texts[generation.request.number]
        self.tokens: list[dict[str, Any]] = []
        self.top_tokens: list[list[dict[str, Any]]] = []
        self.finish_reason: str | None = None
        self.logprob = 0.0
        """The sum of the tokens' log-probabilities, by which the best sequence is chosen."""
        self._texts: list[str] = []

    @property
    def text(self) -> str:
        """`generated_text`."""
        return (self.input if self._parameters.return_full_text else "") + "".join(self._texts)

    def add(self, delta: Delta) -> None:
        """Add a delta's tokens."""
        tokenizer = self._generation.target.tokenizer
        hidden = tokenizer.special_ids if self._generation.request.skip_special_tokens else frozenset()
        texts = self._texts_of(delta, hidden)
        # With stop strings, what a token's text is says nothing of where the whole text ends.
        self._texts += texts if self._generation.request.token_texts and texts else [delta.text]
        for position, token_id in enumerate(delta.token_ids):
            logprob = delta.logprobs[position] if delta.logprobs else None
            value = None if logprob is None else logprob.logprob
            token: dict[str, Any] = {"id": token_id, "text": texts[position], "log_prob": value}
            if token_id in tokenizer.special_ids:
                token["special_token"] = True
            self.tokens.append(token)
            self.logprob += value or 0.0
            if logprob is not None and self._parameters.top_n_tokens:
                self.top_tokens.append([self._token(i, each) for i, each in logprob.top])
        if delta.finish_reason is not None:
            self.finish_reason = _finish_reason(delta)

    def _texts_of(self, delta: Delta, hidden: frozenset[int] | set[int]) -> list[str]:
        """A text for each token. In a stream they are together what the delta adds to the whole text."""
        count = len(delta.token_ids)
        if self._streams and not self._generation.request.token_texts:
            return [*[""] * (count - 1), delta.text] if count else []
        given = [*delta.token_texts, *[""] * (count - len(delta.token_texts))]
        return ["" if token in hidden else text for token, text in zip(delta.token_ids, given, strict=True)]

    def lines(self, delta: Delta) -> list[dict[str, Any]]:
        """The stream's objects for a delta."""
        before = len(self.tokens)
        self.add(delta)
        lines: list[dict[str, Any]] = [{"token": token} for token in self.tokens[before:]]
        if self.finish_reason is not None:
            if not lines:  # the end came without a token
                lines = [{"token": {"id": -1, "text": delta.text, "log_prob": 0.0, "special_token": True}}]
            lines[-1]["generated_text"] = self.text
            if self._parameters.details:
                lines[-1]["details"] = {
                    "finish_reason": self.finish_reason,
                    "generated_tokens": len(self.tokens),
                    "inputs": self.input,
                }
        return lines

    def details(self) -> dict[str, Any]:
        """`details`, without the input."""
        details: dict[str, Any] = {
            "finish_reason": self.finish_reason,
            "generated_tokens": len(self.tokens),
            "tokens": encoded(self.tokens),
        }
        if self._parameters.decoder_input_details:
            logprobs: list[float | None] = [None, *(each.logprob for each in self._generation.prompt_logprobs)]
            ids = self._generation.prompt_token_ids
            details["prefill"] = encoded(self._token(i, value) for i, value in zip(ids, logprobs, strict=False))
        if self.top_tokens:
            details["top_tokens"] = encoded(self.top_tokens)
        return details

    def _token(self, token_id: int, logprob: float | None) -> dict[str, Any]:
        return {
            "id": token_id,
            "text": self._generation.target.tokenizer.token_text(token_id),
            "log_prob": None if logprob is None else floor(logprob),
        }


def _finish_reason(delta: Delta) -> str:
    if delta.finish_reason == FinishReason.LENGTH:
        return "length"
    return "eos_token" if delta.ended_by_eos else "stop_sequence"
