"""POST /v1/completions: prompts in, text out, whole or streamed."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import msgspec

from inference.dialects.openai import schema, tgi_clients
from inference.dialects.openai.kv_transfer import answered
from inference.dialects.openai.load import load_headers
from inference.dialects.openai.prompts import is_empty, parse_forms
from inference.dialects.openai.request_ids import name_request
from inference.dialects.openai.schema import CompletionRequest
from inference.dialects.openai.streams import STREAM
from inference.dialects.openai.usage import running_usage, usage
from inference.errors import InvalidRequest
from inference.generation.answer import Job, Reply, answer, preparing
from inference.generation.deltas import by_token, joined
from inference.generation.requests import Prompt, TextPrompt
from inference.http.exchange import json_response
from inference.http.offload import encoded
from inference.http.sse import event
from inference.http.validation import check_range, lenient
from inference.vendors.openai_logprobs import Context, LogprobTexts

if TYPE_CHECKING:
    from collections.abc import Iterable

    from engine.messages import TokenLogprob
    from inference.generation.deltas import Delta
    from inference.generation.generation import Generation
    from inference.generation.requests import GenerationRequest, GrammarRequest
    from inference.http.exchange import Exchange, Response
    from inference.services import Limits, Services

DEFAULT_MAX_TOKENS = 16


async def create(exchange: Exchange, services: Services) -> None:
    """POST /v1/completions."""
    with services.admission.permit(exchange.permit_holder):
        body = await exchange.work(lenient, await exchange.json(), CompletionRequest)
        name_request(exchange, body.request_id)
        requests = await parse(body, exchange, services)

        def reply(generations: list[Generation]) -> CompletionReply:
            return CompletionReply(body, generations, exchange, services)

        async def prepare() -> list[Generation]:
            generations = await preparing(requests, exchange, services, "openai")()
            check_prompt_entries(body, generations, services.limits)
            return generations

        await answer(exchange, Job(prepare, reply, STREAM if body.stream else None))


async def parse(body: CompletionRequest, exchange: Exchange, services: Services) -> list[GenerationRequest]:
    """One GenerationRequest for each prompt."""
    grammar = await exchange.work(check, body, services.limits)
    prompts = await exchange.work(parse_prompts, body, services.limits)
    target = services.router.resolve(body.model)
    overrides = await exchange.work(schema.sampling, body, body.logprobs, target.tokenizer)
    if body.sequences > (body.n or 1) and overrides.logprobs is None:
        overrides = replace(overrides, logprobs=0)
    if body.echoes_logprobs and overrides.prompt_logprobs is None:
        overrides = replace(overrides, prompt_logprobs=body.logprobs)
    return [
        schema.generation_request(
            body,
            prompt,
            overrides,
            target.info.max_model_len,
            max_tokens=DEFAULT_MAX_TOKENS if body.max_tokens is None else max(body.max_tokens, 1),
            grammar=grammar,
            sequences=body.sequences,
            number=number,
            session=exchange.header("x-session-id"),
        )
        for number, prompt in enumerate(prompts)
    ]


def check(body: CompletionRequest, limits: Limits) -> GrammarRequest | None:
    """Checks specific to this route.

    Returns the grammar of the body.
    """
    grammar = schema.check(body, limits)
    check_range("max_tokens", body.max_tokens, 0 if body.echo else 1, 1 << 31)
    check_range("logprobs", body.logprobs, 0, limits.max_logprobs)
    if body.logprob_token_ids is not None and body.logprobs is None:
        raise InvalidRequest("when using `logprob_token_ids`, `logprobs` must be set.", "logprob_token_ids")
    if body.use_beam_search and body.echoes_logprobs:
        raise InvalidRequest(
            "`echo` with `logprobs` is not supported with beam search because beam search does not compute prompt logprobs.",
            "echo",
        )
    check_range("best_of", body.best_of, 1, limits.max_sequences)
    if body.best_of is not None and body.best_of < (body.n or 1):
        raise InvalidRequest("best_of must be at least n.", "best_of")
    if body.stream and body.sequences != (body.n or 1):
        raise InvalidRequest("best_of must equal n when `stream=True`.", "best_of")
    return grammar


def check_prompt_entries(body: CompletionRequest, generations: list[Generation], limits: Limits) -> None:
    """Raise InvalidRequest if the response would have too many log-probabilities of prompts: every choice has them all."""
    shown = body.echoes_logprobs + (body.shows_prompt_logprobs and not body.stream)
    entries = sum(len(g.prompt_token_ids) * (1 + (g.params.prompt_logprobs or 0)) for g in generations)
    if (wanted := entries * (body.n or 1) * shown) > limits.max_prompt_entries:
        field = "logprobs" if body.prompt_logprobs is None else "prompt_logprobs"
        raise InvalidRequest(
            f"{field}: prompt tokens times choices times log-probabilities of each must be at most "
            f"{limits.max_prompt_entries}, got {wanted}.",
            field,
        )


def parse_prompts(body: CompletionRequest, limits: Limits) -> list[Prompt]:
    """`prompt` in its four forms."""
    if is_empty(body.prompt):
        raise InvalidRequest("Either prompt or prompt_embeds must be provided and non-empty.", "prompt")
    prompts = parse_forms(body.prompt, "prompt", limits.max_prompts, body.add_special_tokens is not False)
    if len(prompts) * body.sequences > limits.max_sequences:
        raise InvalidRequest(f"prompts times n or best_of must be at most {limits.max_sequences}.", "n")
    return prompts


class Choice:
    """The state of one sequence."""

    def __init__(self, completion: CompletionReply, generation: Generation, index: int) -> None:
        self.completion, self.generation, self.index = completion, generation, index
        self.offset = 0
        self.context = Context(generation.prompt_token_ids)
        self.completion_tokens = 0
        self.started = False

    def part(self, delta: Delta) -> dict[str, Any]:
        """The choice's fields for `delta`; the first one includes the echoed prompt."""
        body, generation = self.completion.body, self.generation
        text, entries = delta.text, self._entries(delta)
        if body.max_tokens == 0:
            text, entries = "", []
        else:
            self.completion_tokens += len(delta.token_ids)
        first, self.started = not self.started, True
        if body.echo and first:
            # Whoever gets the prompt's ids does not get its text as well, as in vLLM.
            text = text if body.return_token_ids else self.completion.prompt_text(generation) + text
        logprobs = None
        if body.logprobs is not None:
            before = self.completion.echoed(generation) if body.echo and first else None
            logprobs = self.completion.texts.completion(entries, self.offset, self.context, before)
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
        if first and (body.return_token_ids or (body.echo and body.stream)):
            part["prompt_token_ids"] = generation.prompt_token_ids
        return part

    def _entries(self, delta: Delta) -> list[tuple[int, TokenLogprob | None]]:
        return [(t.token_id, t) for t in delta.logprobs or []]


class CompletionReply(Reply):
    """All prompts and sequences of one request; choice i of prompt p has the index p * n + i."""

    def __init__(
        self, body: CompletionRequest, generations: list[Generation], exchange: Exchange, services: Services
    ) -> None:
        self.body, self.generations, self._exchange = body, generations, exchange
        self.fingerprint, self._shows_cached = services.fingerprint, services.shown.cached_tokens
        self.texts = LogprobTexts(generations[0].target.tokenizer, bool(body.return_tokens_as_token_ids))
        self.n = body.n or 1
        self._as_tgi = tgi_clients.completes(body)
        self.head = {
            "id": f"cmpl-{exchange.request_id}",
            "object": "text_completion",
            "created": int(time.time()),
            "model": body.model or generations[0].target.entry.name,
        }
        self._choices = [
            Choice(self, generation, p * self.n + i) for p, generation in enumerate(generations) for i in range(self.n)
        ]
        self._held: list[Delta] = []
        """Deltas that wait for the log-probabilities of echoed prompts."""
        self._deltas: dict[tuple[int, int], list[Delta]] = {}
        self._echoed: dict[int, dict[str, list[Any]]] = {}
        self._prompt_logprobs: dict[int, msgspec.Raw | None] = {}
        """Of each prompt, for all of its choices."""

    def prompt_text(self, generation: Generation) -> str:
        """The text that `echo` puts before the completion: the prompt as sent, or the text of its ids."""
        prompt = generation.request.prompt
        if isinstance(prompt, TextPrompt):
            return prompt.text
        return generation.target.tokenizer.decode(generation.prompt_token_ids)

    def echoed(self, generation: Generation) -> dict[str, list[Any]]:
        """The prompt's lists of `logprobs`, which are the same in each of its choices."""
        number = generation.request.number
        if number not in self._echoed:
            known: list[TokenLogprob | None] = [None, *generation.prompt_logprobs]
            lists = self.texts.lists(list(zip(generation.prompt_token_ids, known, strict=False)), 0, Context())
            rows = [msgspec.Raw(msgspec.json.encode(row)) for row in lists["top_logprobs"]]
            self._echoed[number] = {**lists, "top_logprobs": rows}
        return self._echoed[number]

    def heavy(self, delta: Delta) -> bool:
        """Whether a choice begins with a long prompt's log-probabilities."""
        if not self.body.echoes_logprobs or not self._echo_known():
            return False
        begun = {each.prompt for each in [*self._held, delta] if not self._choice_of(each).started}
        return any(self.generations[number].heavy for number in begun)

    def _choice_of(self, delta: Delta) -> Choice:
        return self._choices[delta.prompt * self.n + delta.index]

    def chunks(self, delta: Delta) -> Iterable[bytes]:
        """One chunk for each delta; held until an echoed prompt's log-probabilities are known."""
        self._held += by_token(delta) if self._as_tgi else [delta]
        if not self._echo_known():
            return
        ready, self._held = self._held, []
        for each in ready:
            choice = self._choice_of(each)
            chunk = {**self.head, "choices": [choice.part(each)]}
            if self._as_tgi:
                chunk["system_fingerprint"] = self.fingerprint
                if each.finish_reason is not None:
                    chunk["usage"] = self._usage([self.generations[each.prompt]])
            if self.body.continuous_usage:
                chunk["usage"] = running_usage(choice.generation.usage.prompt_tokens, choice.completion_tokens)
            yield event(chunk)

    def last_chunks(self) -> Iterable[bytes]:
        """Usage, if requested."""
        if self.body.include_usage:
            yield event({**self.head, "choices": [], "usage": self._usage(self.generations)})

    def add(self, delta: Delta) -> None:
        """Keep the delta; choices are built from all deltas at once."""
        self._deltas.setdefault((delta.prompt, delta.index), []).append(delta)

    def whole(self) -> Response:
        sequences = self._best({key: joined(self._deltas[key]) for key in sorted(self._deltas)})
        choices = encoded((self._choice(index, sequence) for index, sequence in enumerate(sequences)), 1)
        nulls = {"service_tier": None, "system_fingerprint": self.fingerprint}
        held = {"kv_transfer_params": answered(self.generations[0])}
        value = {**self.head, "choices": choices, "usage": self._usage(self.generations), **nulls, **held}
        return json_response(value, headers=load_headers(self._exchange, self.generations[0].target))

    def _choice(self, index: int, sequence: Delta) -> dict[str, Any]:
        generation, body = self.generations[index // self.n], self.body
        choice = Choice(self, generation, index).part(sequence)
        choice.setdefault("token_ids", None)
        choice.setdefault("prompt_token_ids", None)
        number = generation.request.number
        if number not in self._prompt_logprobs:
            asked = body.shows_prompt_logprobs
            given = generation.prompt_token_ids, generation.prompt_logprobs
            self._prompt_logprobs[number] = self.texts.prompt(*given) if asked else None
        choice["prompt_logprobs"] = self._prompt_logprobs[number]
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
        """Whether the prompt log-probabilities needed for `echo` have arrived."""
        if not self.body.echoes_logprobs:
            return True
        return all(len(g.prompt_logprobs) >= len(g.prompt_token_ids) - 1 for g in self.generations)

    def _usage(self, generations: list[Generation]) -> dict[str, Any]:
        completion = 0 if self.body.max_tokens == 0 else sum(g.usage.completion_tokens for g in generations)
        cached = sum(g.usage.cached_tokens for g in generations) if self._shows_cached else None
        return usage(sum(g.usage.prompt_tokens for g in generations), completion, cached)


def _mean_logprob(sequence: Delta) -> float:
    logprobs = [token.logprob for token in sequence.logprobs or []]
    return sum(logprobs) / max(1, len(logprobs))
