"""POST /v1/completions: prompts in, text out, whole or streamed."""

from __future__ import annotations

import time
from contextlib import aclosing
from typing import TYPE_CHECKING, Any

from inference.dialects.openai import schema
from inference.dialects.openai.load import load_headers
from inference.dialects.openai.prompts import is_empty, parse_forms
from inference.dialects.openai.schema import CompletionRequest
from inference.dialects.openai.streams import HEADERS, KEEP_ALIVE
from inference.dialects.openai.usage import usage
from inference.errors import InvalidRequest
from inference.generation.merging import merge
from inference.generation.requests import Prompt, TextPrompt
from inference.http.exchange import json_response
from inference.http.offload import beside_if, encoded
from inference.http.sse import DONE, event
from inference.http.validation import check_range, convert
from inference.vendors import openai_errors
from inference.vendors.openai_logprobs import LogprobTexts

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

    from engine.messages import TokenLogprob
    from inference.generation.deltas import Delta
    from inference.generation.generate import Generation
    from inference.http.exchange import Exchange
    from inference.services import Limits, Services

DEFAULT_MAX_TOKENS = 16
INLINE_CHOICES = 16


async def create(exchange: Exchange, services: Services) -> None:
    """The route's handler."""
    with services.admission.place(exchange.tenant):
        body = await exchange.work(convert, await exchange.json(), CompletionRequest)
        await exchange.work(check, body, services.limits)
        prompts = await exchange.work(parse_prompts, body, services.limits)
        target = services.router.resolve(body.model)
        max_tokens = DEFAULT_MAX_TOKENS if body.max_tokens is None else max(body.max_tokens, 1)
        fields = await exchange.work(schema.sampling, body, body.logprobs, target.tokenizer)
        if body.sequences > (body.n or 1):
            fields.setdefault("logprobs", 0)
        if body.echo and body.logprobs is not None:
            fields.setdefault("prompt_logprobs", body.logprobs)
        generations = []
        for prompt in prompts:
            request = schema.generation_request(body, prompt, max_tokens, fields, target.info.max_model_len)
            request.n = body.sequences
            generations.append(await services.generator.prepare(request, exchange, "openai"))
        completion = Completion(body, generations, exchange.request_id, services.fingerprint)
        if body.stream:
            await exchange.stream(
                completion.chunks(),
                headers=HEADERS,
                render_error=openai_errors.render_event,
                keep_alive=KEEP_ALIVE,
                end=DONE,
            )
        else:
            answer = await exchange.unless_gone(completion.whole())
            await exchange.respond(json_response(answer, headers=load_headers(exchange, target)))


def check(body: CompletionRequest, limits: Limits) -> None:
    """The rules of this route beside the common ones."""
    schema.check(body, limits)
    check_range("max_tokens", body.max_tokens, 0 if body.echo else 1, 1 << 31)
    check_range("logprobs", body.logprobs, 0, limits.max_logprobs)
    check_range("best_of", body.best_of, 1, limits.max_sequences)
    if body.best_of is not None and body.best_of < (body.n or 1):
        raise InvalidRequest("best_of must be at least n.", "best_of")
    if body.stream and body.sequences != (body.n or 1):
        raise InvalidRequest("best_of must equal n when `stream=True`.", "best_of")


def parse_prompts(body: CompletionRequest, limits: Limits) -> list[Prompt]:
    """`prompt` in its four forms."""
    if is_empty(body.prompt):
        raise InvalidRequest("Either prompt or prompt_embeds must be provided and non-empty.", "prompt")
    prompts = parse_forms(body.prompt, "prompt", limits.max_prompts, body.add_special_tokens is not False)
    if len(prompts) * body.sequences > limits.max_sequences:
        raise InvalidRequest(f"prompts times n or best_of must be at most {limits.max_sequences}.", "n")
    return prompts


class Choice:
    """One sequence as it grows."""

    def __init__(self, completion: Completion, generation: Generation, index: int) -> None:
        self.completion, self.generation, self.index = completion, generation, index
        self.offset = 0
        self.started = False

    def part(self, delta: Delta) -> dict[str, Any]:
        """The choice's fields for what `delta` adds, the echoed prompt before the first."""
        body, generation = self.completion.body, self.generation
        text, entries = delta.text, self._entries(delta)
        if body.max_tokens == 0:
            text, entries = "", []
        if body.echo and not self.started:
            text = self.completion.prompt_text(generation) + text
            entries = self._prompt_entries() + entries
        first, self.started = not self.started, True
        logprobs = None
        if body.shows_logprobs:
            logprobs = self.completion.texts.completion(entries, self.offset)
            self.offset += sum(map(len, logprobs["tokens"]))
        part = {
            "index": self.index,
            "text": text,
            "logprobs": logprobs,
            "finish_reason": delta.finish_reason,
            "stop_reason": delta.stop_reason,
        }
        if body.return_token_ids:
            part["token_ids"] = delta.token_ids
            if first:
                part["prompt_token_ids"] = generation.prompt_token_ids
        return part

    def _entries(self, delta: Delta) -> list[tuple[int, TokenLogprob | None]]:
        return [(t.token_id, t) for t in delta.logprobs or []]

    def _prompt_entries(self) -> list[tuple[int, TokenLogprob | None]]:
        generation = self.generation
        known: list[TokenLogprob | None] = [None, *generation.prompt_logprobs]
        return list(zip(generation.prompt_token_ids, known, strict=False))


class Completion:
    """All prompts and sequences of one request; choice i of prompt p has the index p * n + i."""

    def __init__(
        self, body: CompletionRequest, generations: list[Generation], request_id: str, fingerprint: str
    ) -> None:
        self.body, self.generations, self.fingerprint = body, generations, fingerprint
        self.texts = LogprobTexts(generations[0].target.tokenizer, bool(body.return_tokens_as_token_ids))
        self.n = body.n or 1
        self.head = {
            "id": f"cmpl-{request_id}",
            "object": "text_completion",
            "created": int(time.time()),
            "model": body.model or generations[0].target.entry.name,
        }

    def prompt_text(self, generation: Generation) -> str:
        """What `echo` puts before the completion: the prompt as sent, or the text of its ids."""
        prompt = generation.request.prompt
        if isinstance(prompt, TextPrompt):
            return prompt.text
        return generation.target.tokenizer.decode(generation.prompt_token_ids)

    async def chunks(self) -> AsyncGenerator[bytes, None]:
        """The stream's frames, without [DONE]."""
        choices = [
            Choice(self, generation, p * self.n + i)
            for p, generation in enumerate(self.generations)
            for i in range(self.n)
        ]
        held: list[tuple[int, Delta]] = []
        async with aclosing(self._merged()) as deltas:
            async for p, delta in deltas:
                held.append((p, delta))
                if not self._echo_known():
                    continue
                for number, ready in held:
                    chunk = {**self.head, "choices": [choices[number * self.n + ready.index].part(ready)]}
                    if self.body.continuous_usage:
                        chunk["usage"] = self._usage()
                    yield event(chunk)
                held = []
        if self.body.include_usage:
            yield event({**self.head, "choices": [], "usage": self._usage()})

    async def whole(self) -> dict[str, Any]:
        """The complete answer."""
        parts: dict[tuple[int, int], list[Delta]] = {}
        async with aclosing(self._merged()) as deltas:
            async for p, delta in deltas:
                parts.setdefault((p, delta.index), []).append(delta)
        heavy = len(parts) > INLINE_CHOICES or any(generation.heavy for generation in self.generations)
        return await beside_if(heavy, self._whole, parts)

    def _whole(self, parts: dict[tuple[int, int], list[Delta]]) -> dict[str, Any]:
        sequences = self._best({place: joined(parts[place]) for place in sorted(parts)})
        choices = encoded((self._choice(index, sequence) for index, sequence in enumerate(sequences)), 1)
        nulls = {"service_tier": None, "system_fingerprint": self.fingerprint, "kv_transfer_params": None}
        return {**self.head, "choices": choices, "usage": self._usage(), **nulls}

    def _choice(self, index: int, sequence: Delta) -> dict[str, Any]:
        generation, asked = self.generations[index // self.n], self.body.prompt_logprobs is not None
        choice = Choice(self, generation, index).part(sequence)
        choice.setdefault("token_ids", None)
        choice.setdefault("prompt_token_ids", None)
        choice["prompt_logprobs"] = self.texts.prompt(generation.prompt_logprobs) if asked else None
        return choice

    def _best(self, sequences: dict[tuple[int, int], Delta]) -> list[Delta]:
        """`n` of each prompt's `best_of` sequences: those with the highest log-probability per token."""
        best: list[Delta] = []
        for p in range(len(self.generations)):
            mine = [sequence for (number, _), sequence in sequences.items() if number == p]
            if len(mine) > self.n:
                mine = sorted(mine, key=_mean_logprob, reverse=True)[: self.n]
            best += mine
        return best

    def _echo_known(self) -> bool:
        """Whether the prompts' log-probabilities, which come with each first sequence, are complete where needed."""
        if not self.body.echo or self.body.logprobs is None:
            return True
        return all(len(g.prompt_logprobs) >= len(g.prompt_token_ids) - 1 for g in self.generations)

    def _merged(self) -> AsyncGenerator[tuple[int, Delta], None]:
        return merge([generation.deltas() for generation in self.generations])

    def _usage(self) -> dict[str, Any]:
        completion = 0 if self.body.max_tokens == 0 else sum(g.usage.completion_tokens for g in self.generations)
        return usage(sum(g.usage.prompt_tokens for g in self.generations), completion)


def _mean_logprob(sequence: Delta) -> float:
    logprobs = [token.logprob for token in sequence.logprobs or []]
    return sum(logprobs) / max(1, len(logprobs))


def joined(deltas: list[Delta]) -> Delta:
    """All of one sequence's deltas as one."""
    whole = deltas[-1]
    whole.text = "".join(delta.text for delta in deltas)
    whole.token_ids = [token for delta in deltas for token in delta.token_ids]
    if whole.logprobs is not None:
        whole.logprobs = [logprob for delta in deltas for logprob in delta.logprobs or []]
    return whole
