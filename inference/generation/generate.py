"""The use case that all dialects share: from a GenerationRequest to a stream of Deltas.

The life of a request here: (1) the dialect has decoded the body and taken a place (`Admission`); (2) `prepare`
resolves the model in the snapshot, (3) tokenises, checks lengths and fills in defaults; nothing has reached an engine
so far, so every refusal is an ordinary answer. (4) `Generation.deltas` submits the sequences to the least busy
worker, (5) turns token ids into text, looks for stop strings, (6) yields until every sequence has ended. (7) Closing
the iterator early, by disconnect, stop string, deadline or error, aborts in the engine; (8) `finally` counts and logs.
"""

from __future__ import annotations

import math
import secrets
import time
from contextlib import aclosing
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import msgspec
import structlog

from engine.client import EngineDead
from inference.errors import (
    DeadlineExceeded,
    GenerationFailed,
    InvalidRequest,
    OutOfVocabulary,
    Overloaded,
    PromptTooLong,
    ServingError,
    ShuttingDown,
)
from inference.generation.deltas import Delta, Timings, Usage
from inference.generation.merging import merge
from inference.generation.requests import ChatPrompt
from inference.generation.text import IncrementalDecoder, StopStrings
from inference.http.validation import in_range
from inference.workers.tokenizer import Beginning

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable

    from engine.client import EngineClient
    from engine.messages import RequestOutput, TokenLogprob
    from engine.sampling.params import Grammar, SamplingParams
    from inference.generation.requests import GenerationRequest
    from inference.http.exchange import Exchange
    from inference.workers.router import EngineRouter, Target

logger = structlog.get_logger(__name__)

SEED_MASK = (1 << 64) - 1
INLINE_ENTRIES = 2000
"""Tokens and their alternatives that an answer may tell of and still be written on the event loop."""


@dataclass(frozen=True, slots=True)
class Caller:
    """Who asks, where the request is no HTTP exchange."""

    request_id: str
    tenant: str = ""
    connection: str = ""

    @property
    def occupant(self) -> str:
        """Whose share of the places it takes: without keys each connection stands for a client."""
        return self.tenant or self.connection


class Observer(Protocol):
    """Is told of every generation; a plane's metrics."""

    def started(self, generation: Generation) -> None:
        """It goes to an engine."""

    def finished(self, generation: Generation, finish: str, token_times: list[float], preemptions: int) -> None:
        """It ended: "stop", "length", "error", or "abort" when the client left. Times are monotonic seconds."""


class Generator:
    """Prepares requests against the running deployments."""

    def __init__(
        self,
        router: EngineRouter,
        observers: list[Observer],
        request_timeout_s: float,
        beam_search: Callable[..., Generation],
    ) -> None:
        """`beam_search` makes the Generation of a request with beams."""
        self.router, self.observers, self.request_timeout_s = router, observers, request_timeout_s
        self._beam_search = beam_search

    async def prepare(self, request: GenerationRequest, exchange: Exchange | Caller, dialect: str) -> Generation:
        """Resolve, tokenise, check and default; raises a ServingError and changes nothing."""
        arrived = time.monotonic()
        target = self.router.resolve(request.model)
        if target.info.embedding is not None:
            raise InvalidRequest(f"The model `{target.entry.name}` makes embeddings and generates no text.", "model")
        prompt = await target.tokenizer.encode(
            request.prompt, request.truncate_left, request.truncate_right, _longest_prompt(request, target)
        )
        if request.truncate_right is not None:
            prompt = prompt[: request.truncate_right]
        params = self._params(request, target, prompt)
        make = self._beam_search if request.beams else Generation
        return make(self, request, target, prompt, params, exchange, dialect, Timings(arrived))

    def _params(self, request: GenerationRequest, target: Target, prompt: list[int]) -> SamplingParams:
        """Lengths and token ids checked against the model, defaults filled in."""
        info = target.info
        if not prompt:
            raise InvalidRequest("The prompt is empty: it must hold at least one token.", "prompt")
        room = info.max_model_len - len(prompt)
        limit = _longest_prompt(request, target)
        if len(prompt) > limit:  # before anything looks at every id
            least = "at least " if isinstance(prompt, Beginning) else ""
            raise PromptTooLong(
                f"This model's maximum context length is {info.max_model_len} tokens. However, your prompt contains "
                f"{least}{len(prompt)} tokens, which leaves no room for output.",
                "prompt",
                len(prompt),
                limit,
            )
        if not in_range(prompt, info.vocab_size):
            strange = next(t for t in prompt if not 0 <= t < info.vocab_size)
            raise OutOfVocabulary(
                f"Token id {strange} is out of vocabulary: ids must be between 0 and {info.vocab_size - 1}.", "prompt"
            )
        named = request.sampling
        if "bad_words" in named:  # a tokenizer may know more tokens than the model
            named["bad_words"] = [w for w in named["bad_words"] if max(w) < info.vocab_size]
        if "allowed_token_ids" in named:
            named["allowed_token_ids"] = sorted(set(named["allowed_token_ids"]))
        for name in ("logit_bias", "allowed_token_ids", "stop_token_ids", "logprob_token_ids"):
            if not in_range(list(map(int, named.get(name) or ())), info.vocab_size):
                raise InvalidRequest(f"{name}: token ids must be between 0 and {info.vocab_size - 1}.", name)
        max_tokens = room if request.max_tokens is None else min(request.max_tokens, room)
        if named.get("min_tokens", 0) > max_tokens:
            raise InvalidRequest(f"min_tokens must be at most max_tokens, which is {max_tokens} here.", "min_tokens")
        if "grammar" in named and isinstance(request.prompt, ChatPrompt):
            named["grammar"] = _behind_thoughts(named["grammar"], target, prompt)
        seed = secrets.randbits(64) if request.seed is None else request.seed & SEED_MASK
        params = request.params(max_tokens, seed, info.sampling_defaults)
        if params.greedy and request.n > 1 and not request.beams:
            raise InvalidRequest(f"n must be 1 when using greedy sampling, got {request.n}.", "n")
        return params


class Generation:
    """A request that was accepted: run it once with `deltas`, then read `usage` and `prompt_logprobs`."""

    def __init__(
        self,
        generator: Generator,
        request: GenerationRequest,
        target: Target,
        prompt_token_ids: list[int],
        params: SamplingParams,
        exchange: Exchange | Caller,
        dialect: str,
        timings: Timings,
    ) -> None:
        self.request, self.target, self.params = request, target, params
        self.prompt_token_ids, self.request_id, self.dialect = prompt_token_ids, exchange.request_id, dialect
        # Equal prompts share cached blocks only within one API key.
        self._cache_salt = f"{exchange.tenant}:{request.cache_salt}"
        self.timings = timings
        self.usage = Usage(prompt_tokens=len(prompt_token_ids))
        self.prompt_logprobs: list[TokenLogprob] = []
        self.sequence_tokens = [0] * request.n
        self._generator = generator
        self._token_times: list[float] = []
        self._preemptions = 0
        self._unfinished = request.n
        self._finish = "abort"
        self.stopped = False
        self._deadline = math.inf
        self._submitted: list[tuple[EngineClient, int]] = []

    @property
    def heavy(self) -> bool:
        """Whether there is so much to tell of it that the answer is better written beside the event loop."""
        each = 1 + (self.params.logprobs or 0)
        told = sum(self.sequence_tokens) * each + len(self.prompt_logprobs) * (1 + (self.params.prompt_logprobs or 0))
        return told > INLINE_ENTRIES

    @property
    def batch_size(self) -> int:
        """Sequences in the worker's last step."""
        return max(1, self._submitted[-1][0].stats.running) if self._submitted else 1

    @property
    def ended(self) -> bool:
        """Every sequence has brought its last delta, whether or not that has been sent yet."""
        return not self._unfinished

    def stop(self) -> None:
        """End every sequence where it is: `deltas` ends as after a stop string."""
        self.stopped = True
        for client, request_id in self._submitted:
            client.stop(request_id)

    async def deltas(self) -> AsyncGenerator[Delta, None]:
        """What each step brings, until all sequences have ended; raises a ServingError when they cannot."""
        self.timings.submitted = time.monotonic()
        longest_s = self.request.longest_s or self._generator.request_timeout_s
        self._deadline = self.timings.submitted + min(self.request.timeout_s or math.inf, longest_s)
        for observer in self._generator.observers:
            observer.started(self)
        try:
            async with aclosing(self._merged()) as merged:
                async for delta in merged:
                    self._note_tokens(delta)
                    yield delta
            self._finish = delta.finish_reason or "abort"
        except ServingError:
            self._finish = "error"
            raise
        finally:
            self.timings.finished = time.monotonic()
            for observer in self._generator.observers:
                observer.finished(self, self._finish, self._token_times, self._preemptions)
            logger.info("generation", **self._log_fields())

    async def _merged(self) -> AsyncGenerator[Delta, None]:
        """All sequences' deltas as they come."""
        async with aclosing(merge([self._sequence(index) for index in range(self.request.n)])) as merged:
            async for _, delta in merged:
                yield delta

    async def _sequence(self, index: int) -> AsyncGenerator[Delta, None]:
        """One sequence; it is sent once more when its worker dies before the first token."""
        for attempt in (1, 2):
            if self.stopped:  # before it began
                yield Delta(index, "", [], finish_reason="stop")
                return
            text = _SequenceText(self, index)
            if index == 0:
                self.prompt_logprobs = []
            try:
                async with aclosing(self._outputs(index, self.prompt_token_ids, self._params_of(index))) as outputs:
                    async for output in outputs:
                        delta = text.render(output)
                        if delta.token_ids or delta.finish_reason is not None:
                            yield delta
                        if delta.finish_reason is not None:
                            return
                raise GenerationFailed("The generation ended early.")
            except EngineDead as error:
                if self._generator.router.stopping:
                    raise ShuttingDown("The server is shutting down.") from error
                if text.count or attempt == 2:
                    raise GenerationFailed("The worker that served this request died.") from error
            except ShuttingDown:  # this worker drains; another may not
                if text.count or attempt == 2:
                    raise

    def _params_of(self, index: int) -> SamplingParams:
        if not index:
            return self.params
        return _with(self.params, seed=(self.params.seed + index) & SEED_MASK, prompt_logprobs=None)

    def _outputs(self, index: int, token_ids: list[int], params: SamplingParams) -> AsyncGenerator[RequestOutput, None]:
        """What an engine makes of these tokens, for sequence `index`."""
        client = self.target.pick()
        self._submitted.append((client, client.next_request_id()))
        return client.generate(
            token_ids,
            params,
            request_id=self._submitted[-1][1],
            priority=self.request.priority,
            cache_salt=self._cache_salt,
            timeout_s=self._deadline - time.monotonic(),
            adapter=self.target.adapter_ref,
        )

    def note(self, index: int, output: RequestOutput) -> None:
        """Take the facts that come with an output; raises the error that it may carry."""
        if output.finish_reason == "timeout":
            raise DeadlineExceeded("The request ran into its deadline.")
        if output.error is not None and output.error.startswith("grammar: "):
            field = self.request.grammar_field or "grammar"
            raise InvalidRequest(f"{field}: {output.error.removeprefix('grammar: ')}", field)
        if self.stopped and output.finish_reason == "abort":
            output.finish_reason = "stop"
        if output.finish_reason in ("error", "abort"):
            raise {
                "overloaded": Overloaded("Model is overloaded"),
                "draining": ShuttingDown("The server is shutting down."),
            }.get(output.error or "", GenerationFailed(f"Request failed during generation: {output.error}"))
        if output.cached_tokens is not None and index == 0:
            self.usage.cached_tokens = output.cached_tokens
        if output.queue_s is not None:
            self.timings.queue_s = output.queue_s
        if output.prompt_logprobs:
            self.prompt_logprobs += output.prompt_logprobs
        self._preemptions = max(self._preemptions, output.preemptions)

    def _note_tokens(self, delta: Delta) -> None:
        now = time.monotonic()
        if delta.token_ids and not self.timings.first_token:
            self.timings.first_token = now
        self.timings.last_token = now
        self._token_times.extend([now] * len(delta.token_ids))
        self._unfinished -= delta.finish_reason is not None
        self.usage.completion_tokens += len(delta.token_ids)
        self.sequence_tokens[delta.index] += len(delta.token_ids)

    def _log_fields(self) -> dict[str, object]:
        timings = self.timings
        return {
            "request_id": self.request_id,
            "dialect": self.dialect,
            "deployment": self.target.entry.name,
            "adapter": None if self.target.adapter is None else self.target.adapter.name,
            "finish": self._finish,
            "prompt_tokens": self.usage.prompt_tokens,
            "cached_tokens": self.usage.cached_tokens,
            "completion_tokens": self.usage.completion_tokens,
            "queue_ms": round(timings.queue_s * 1e3, 1),
            "ttft_ms": round((timings.first_token - timings.arrived) * 1e3, 1) if timings.first_token else None,
            "total_ms": round((timings.finished - timings.arrived) * 1e3, 1),
        }


class _SequenceText:
    """Token ids of one sequence into Deltas."""

    def __init__(self, generation: Generation, index: int) -> None:
        request, tokenizer = generation.request, generation.target.tokenizer
        prompt = generation.prompt_token_ids
        self._generation, self._index, self._tokenizer = generation, index, tokenizer
        skip = request.skip_special_tokens and not request.token_texts
        self._decoder = IncrementalDecoder(tokenizer.fast, prompt, skip)
        self._stops = StopStrings(request.stop, request.include_stop)
        self._eos = generation.target.info.eos_token_ids
        self.count = 0

    def render(self, output: RequestOutput) -> Delta:
        """One engine output, which may hold several tokens when this reader lagged."""
        self._generation.note(self._index, output)
        delta = Delta(self._index, "", [])
        shown: list[str] = []
        for position, token in enumerate(output.token_ids):
            self.count += 1
            delta.token_ids.append(token)
            last = position == len(output.token_ids) - 1
            if last and output.stop_token_id is not None and not self._generation.request.include_stop:
                break  # the token that ends the text is no part of it
            text = self._decoder.step(token)
            delta.token_texts.append(text)
            if self.count < self._generation.params.min_tokens:
                shown.append(text)
                continue
            text, found = self._stops.feed(text)
            shown.append(text)
            if found is not None:
                delta.finish_reason, delta.stop_reason = "stop", found
                break
        if delta.finish_reason is None and output.finish_reason is not None:
            shown.append(self._stops.flush())
            delta.finish_reason = output.finish_reason
            if output.stop_token_id is None:  # a complete grammar ends the text as its end token would
                delta.ended_by_eos = output.finish_reason == "stop" and not self._generation.stopped
            else:
                delta.ended_by_eos = output.stop_token_id in self._eos
                delta.stop_reason = None if delta.ended_by_eos else output.stop_token_id
        delta.text = "".join(shown)
        if output.logprobs is not None:
            delta.logprobs = output.logprobs[: len(delta.token_ids)]
        return delta


def _longest_prompt(request: GenerationRequest, target: Target) -> int:
    """In tokens: one at least must be left for output."""
    longest = target.info.max_model_len
    return min(longest - 1, request.max_prompt_tokens or longest)


def _behind_thoughts(grammar: Grammar, target: Target, prompt: list[int]) -> Grammar:
    """The grammar of an answer that thoughts may come before, where the model has tokens for that."""
    ids = target.tokenizer.thought_ids(target.info.vocab_size)
    if ids is None:
        return grammar
    begun = target.tokenizer.leaves_thinking(prompt)
    return msgspec.structs.replace(grammar, think_begin=None if begun else ids[0], think_end=ids[1], thinking=begun)


def _with(params: SamplingParams, **changes: object) -> SamplingParams:
    return msgspec.structs.replace(params, **changes)
