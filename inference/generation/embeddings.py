"""Computes embeddings, for every dialect."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import msgspec
import numpy as np
import structlog

from engine.client import EngineDead
from engine.failures import FailureCode, FinishReason, words
from engine.messages import Embed
from inference.errors import (
    DeadlineExceeded,
    GenerationFailed,
    InvalidRequest,
    OutOfVocabulary,
    Overloaded,
    PromptTooLong,
    ServingError,
    ShuttingDown,
    TemplateError,
)
from inference.generation.deltas import Timings
from inference.generation.ending import EndCause
from inference.generation.failures import refused
from inference.generation.placement import Interrupted, Placement, ReplayCause, interruption
from inference.generation.requests import Prompt, TextPrompt
from inference.http.offload import in_thread
from inference.http.validation import in_range
from inference.telemetry import trace_context
from inference.telemetry.base import EmbeddingRun
from inference.workers.routing.demand import Demand
from inference.workers.target import Superseded
from inference.workers.tokenizer import CHARACTERS_PER_TOKEN, length_in_words

if TYPE_CHECKING:
    from engine.messages import EmbeddingInfo, RequestOutput, Tenant
    from inference.generation.caller import Caller
    from inference.generation.generation import Observer
    from inference.workers.router import EngineRouter
    from inference.workers.target import Target

logger = structlog.get_logger(__name__)


Tracker = Callable[["Target", float], AbstractContextManager[None]]


@dataclass(slots=True)
class EmbeddingRequest:
    """Texts to embed.

    `dimensions` is the length of the vectors (None: the model's). `normalise`: whether they have length 1 (None: as
    the model's files say). `truncate_left` keeps that many tokens from the end of each text, `truncate_right` from
    its start.
    """

    model: str | None
    inputs: list[Prompt] = field(default_factory=list)
    dimensions: int | None = None
    normalise: bool | None = None
    truncate_left: int | None = None
    truncate_right: int | None = None
    end_user: str = ""


@dataclass(slots=True)
class Embeddings:
    """`vectors` [inputs, dimensions] float32."""

    target: Target
    vectors: np.ndarray
    prompt_tokens: int


class Embedder:
    """Computes embeddings on the running deployments."""

    def __init__(
        self,
        router: EngineRouter,
        request_timeout_s: float,
        replay_wait_s: float = 0.0,
        tracked: Tracker = lambda target, arrived: nullcontext(),
        rejected: Callable[[str], None] = lambda deployment: None,
        observers: list[Observer] | None = None,
        charge: Callable[[str, int], None] = lambda tenant, tokens: None,
    ) -> None:
        """`observers` are told of every request that has ended. `tracked` is entered while a request is computed, with its target and its arrival (monotonic seconds);
        `rejected` is called with the deployment of a request that is refused because too many are queued; `charge` with the
        tenant and the prompt tokens of each that was answered.
        """
        self.router, self.request_timeout_s, self.replay_wait_s = router, request_timeout_s, replay_wait_s
        self._tracked, self._rejected, self._charge = tracked, rejected, charge
        self._observers = [] if observers is None else observers

    async def embed(self, request: EmbeddingRequest, exchange: Caller, dialect: str) -> Embeddings:
        """Resolve, tokenise, check, compute; raises a ServingError."""
        target, timings = self.router.resolve(request.model), Timings(time.monotonic())
        error: str | None = EndCause.CLIENT_LEFT.value
        done: Embeddings | None = None
        try:
            done, error = await self._embed(request, target, exchange, dialect, timings), None
            self._charge(exchange.tenant, done.prompt_tokens)
            return done
        except Overloaded as failure:
            self._rejected(target.entry.name)
            error = type(failure).__name__
            raise
        except ServingError as failure:
            error = type(failure).__name__
            raise
        finally:
            run = EmbeddingRun(
                trace_context.current(),
                exchange.request_id,
                dialect,
                exchange.tenant,
                target.entry.name,
                target.entry.public_id,
                request.end_user,
                len(request.inputs),
                0 if done is None else done.prompt_tokens,
                timings.arrived,
                timings.submitted,
                time.monotonic(),
                error,
            )
            for observer in self._observers:
                observer.embedded(run)

    async def _embed(
        self, request: EmbeddingRequest, target: Target, exchange: Caller, dialect: str, timings: Timings
    ) -> Embeddings:
        inputs, normalise = await _encode(request, target)
        timeout_s = exchange.standing.within(self.request_timeout_s)
        if await self.router.hold(target, exchange.tenant or exchange.standing.tenant.flow, timeout_s):
            known, target = target, self.router.resolve(request.model)
            if target.tokenizer is not known.tokenizer:  # it has woken with another version of its model
                inputs, normalise = await _encode(request, target)
        timings.submitted = time.monotonic()
        with self._tracked(target, timings.arrived):
            while True:
                try:
                    timeout_s = exchange.standing.within(self.request_timeout_s)
                    asked = Embed(0, inputs, request.dimensions, normalise)
                    output = await self._run(target, asked, exchange.standing.tenant, timeout_s)
                    break
                except Superseded as error:
                    target = error.target
                    inputs, normalise = await _encode(request, target)
        if output.embeddings is None:
            raise _failure(output)
        vectors = np.frombuffer(output.embeddings, dtype="<f4").reshape(len(inputs), -1)
        tokens = sum(map(len, inputs))
        logger.info(
            "embedding",
            request_id=exchange.request_id,
            dialect=dialect,
            deployment=target.entry.name,
            inputs=len(inputs),
            prompt_tokens=tokens,
            total_ms=round((time.monotonic() - timings.arrived) * 1e3, 1),
        )
        return Embeddings(target, vectors, tokens)

    async def _run(self, target: Target, asked: Embed, tenant: Tenant, timeout_s: float) -> RequestOutput:
        """Run, and retry at other workers if one dies or does not take it (nothing has been sent yet)."""
        demand = Demand(range(sum(map(len, asked.inputs))), max_tokens=0, reads_cache=False)
        deadline = time.monotonic() + timeout_s
        placement = Placement(
            target,
            self.router,
            deadline=deadline,
            wait_s=self.replay_wait_s,
            cancelled=lambda: False,
            replays=Counter(),
        )
        ended: Interrupted | None = None
        while (assignment := await placement.worker(ended, demand, begun=False)) is not None:
            client = assignment.client
            try:
                left_s = deadline - time.monotonic()
                output = await client.embed(
                    msgspec.structs.replace(asked, request_id=client.next_request_id(), timeout_s=left_s, tenant=tenant)
                )
                assignment.note(output)
                ended = interruption(client, output)
                if ended is None:
                    return output
            except EngineDead:
                assignment.fail()
                ended = Interrupted(client, ReplayCause.WORKER_DIED)
            finally:
                assignment.leave()
        raise GenerationFailed("The request ended early.")


async def _encode(request: EmbeddingRequest, target: Target) -> tuple[list[list[int]], bool]:
    """The ids of every input for this version of the model, and whether its vectors have length 1; raises a ServingError."""
    info = target.info.embedding
    if info is None:
        raise InvalidRequest(f"The model `{target.entry.name}` generates text and makes no embeddings.", "model")
    if target.adapter is not None:
        raise InvalidRequest(f"The model `{target.entry.name}` makes embeddings and takes no adapters.", "model")
    _check_dimensions(request.dimensions, info, target.entry.name)
    try:
        rows = await _token_ids(request, target, info)
    except (InvalidRequest, TemplateError) as error:
        error.field = error.field or "input"
        raise
    inputs = await in_thread(lambda: [_checked(ids, target, i) for i, ids in enumerate(rows)])
    return inputs, info.normalise if request.normalise is None else request.normalise


async def _token_ids(request: EmbeddingRequest, target: Target, info: EmbeddingInfo) -> list[list[int]]:
    """The ids of every input, truncated as requested; texts are tokenised in one batch."""
    tokenizer = target.tokenizer
    texts = [prompt for prompt in request.inputs if isinstance(prompt, TextPrompt)]
    special = texts[0].add_special_tokens if texts else True
    prepared = [info.prompt + prompt.text for prompt in texts]
    if info.lower_case:
        prepared = [text.lower() for text in prepared]
    longest = target.info.max_model_len
    # Texts that are certainly too long, or truncated, are not tokenised whole; the others go in one batch.
    usual = [text for text in prepared if len(text) <= CHARACTERS_PER_TOKEN * longest]
    encoded, texts_left = iter(await tokenizer.encodings(usual, special)) if usual else iter(()), iter(prepared)
    rows = []
    for prompt in request.inputs:
        if isinstance(prompt, TextPrompt) and len(text := next(texts_left)) <= CHARACTERS_PER_TOKEN * longest:
            ids = tokenizer.cut(list(next(encoded).ids), request.truncate_left, special)
        else:
            asked = TextPrompt(text, special) if isinstance(prompt, TextPrompt) else prompt
            ids = await tokenizer.encode(asked, request.truncate_left, request.truncate_right, longest)
        if request.truncate_right is not None and len(ids) > request.truncate_right:
            ids = _cut_right(ids, request.truncate_right, tokenizer.special_ids)
        rows.append(ids)
    return rows


def _cut_right(ids: list[int], keep: int, special: frozenset[int]) -> list[int]:
    """The first `keep` ids; an end token (a BERT's [SEP]) stays the last, as in transformers' truncation."""
    closing = ids[-1:] if ids[-1] in special and keep > 1 else []
    return ids[: keep - len(closing)] + closing


def _checked(ids: list[int], target: Target, index: int) -> list[int]:
    info = target.info
    if not ids:
        raise InvalidRequest(f"input[{index}] is empty: it must hold at least one token.", "input")
    if len(ids) > info.max_model_len:
        raise PromptTooLong(
            f"This model's maximum context length is {info.max_model_len} tokens. However, input[{index}] has "
            f"{length_in_words(ids)} tokens. Please reduce its length, or set `truncate_prompt_tokens`.",
            "input",
            length_in_words(ids),
            info.max_model_len,
        )
    if not in_range(ids, info.vocab_size):
        strange = next(token for token in ids if not 0 <= token < info.vocab_size)
        raise OutOfVocabulary(
            f"input[{index}]: token id {strange} is out of vocabulary: ids must be between 0 and {info.vocab_size - 1}.",
            "input",
        )
    return ids


def _check_dimensions(wanted: int | None, info: EmbeddingInfo, name: str) -> None:
    if wanted is None or (wanted == info.dimensions and not info.truncations):
        return
    if info.truncations is None:
        allowed = f"between 1 and {info.dimensions}"
        good = 1 <= wanted <= info.dimensions
    elif info.truncations:
        allowed, good = f"one of {info.truncations}", wanted in info.truncations
    else:
        raise InvalidRequest(
            f'Model "{name}" does not support matryoshka representation, changing output dimensions will lead to poor '
            f"results; dimensions must be {info.dimensions} or absent.",
            "dimensions",
        )
    if not good:
        raise InvalidRequest(f"dimensions must be {allowed}, got {wanted}.", "dimensions")


def _failure(output: RequestOutput) -> Exception:
    if output.finish_reason is FinishReason.TIMEOUT:
        return DeadlineExceeded("The request ran into its deadline.")
    code = None if output.error is None else output.error.code
    if output.error is not None and (error := refused(output.error)) is not None:
        return error
    if code is FailureCode.DRAINING or output.finish_reason is FinishReason.MOVED:
        return ShuttingDown("The server is shutting down.")
    return GenerationFailed(f"Request failed: {None if output.error is None else words(output.error)}", output.error)
