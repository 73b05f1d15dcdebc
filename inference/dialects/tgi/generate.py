"""POST /, /generate and /generate_stream."""

from __future__ import annotations

import time
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Any

import msgspec

from engine.failures import FinishReason
from inference.dialects.tgi import errors
from inference.dialects.tgi.embed import embed
from inference.dialects.tgi.errors import invalid
from inference.dialects.tgi.schema import (
    CompatGenerateRequest,
    GenerateRequest,
    generation_request,
    grammar_of,
    parse,
    validate,
    validate_length,
)
from inference.errors import InvalidRequest, ModelNotFound, Overloaded
from inference.generation.answer import Job, Reply, StreamFormat, answer
from inference.generation.requests import TextPrompt, TokenPrompt
from inference.http.exchange import json_response
from inference.http.offload import encoded
from inference.http.sse import event

if TYPE_CHECKING:
    from collections.abc import Iterator

    from inference.generation.deltas import Delta
    from inference.generation.generation import Generation
    from inference.http.exchange import Exchange, Headers, Response
    from inference.services import Services
    from inference.workers.target import Target

KEEP_ALIVE = b":\n\n"
COMPUTE_TYPE = b"cpu"


async def compat(exchange: Exchange, services: Services) -> None:
    """POST /: the response includes the prompt unless `return_full_text` is false; a list if not streamed."""
    value = await exchange.json()
    if not _names_adapter(value) and services.router.resolve(None).info.embedding is not None:
        return await embed(exchange, services, value)
    request: CompatGenerateRequest = parse(value, CompatGenerateRequest)
    full_text = request.parameters.return_full_text is not False  # as the router does without hub information
    await _answer(exchange, services, request, streaming=request.stream, as_list=True, full_text=full_text)


def _names_adapter(value: dict[str, Any]) -> bool:
    """Whether the body names what answers, which need not be the default deployment."""
    parameters = value.get("parameters")
    return isinstance(parameters, dict) and bool(parameters.get("adapter_id"))


async def generate(exchange: Exchange, services: Services) -> None:
    """POST /generate."""
    await _native(exchange, services, streaming=False)


async def generate_stream(exchange: Exchange, services: Services) -> None:
    """POST /generate_stream."""
    await _native(exchange, services, streaming=True)


async def _native(exchange: Exchange, services: Services, streaming: bool) -> None:
    request: GenerateRequest = await exchange.work(parse, await exchange.json(), GenerateRequest)
    full_text = bool(request.parameters.return_full_text)
    await _answer(exchange, services, request, streaming=streaming, as_list=False, full_text=full_text)


async def _answer(
    exchange: Exchange,
    services: Services,
    request: GenerateRequest,
    *,
    streaming: bool,
    as_list: bool,
    full_text: bool,
) -> None:
    started = time.monotonic()

    async def prepare() -> list[Generation]:
        return [await _prepare(exchange, services, request, streaming)]

    def reply(generations: list[Generation]) -> GenerateReply:
        return GenerateReply(request, generations[0], started, as_list=as_list, full_text=full_text)

    def permit() -> AbstractContextManager[None]:
        return counted_permit(exchange, services)

    await answer(exchange, Job(prepare, reply, _stream_format(request) if streaming else None, permit))


def _stream_format(request: GenerateRequest) -> StreamFormat:
    """Status 200 and frames in every case, as in the router."""
    headers: Headers = [
        (b"content-type", b"text/event-stream"),
        (b"cache-control", b"no-cache"),
        (b"x-accel-buffering", b"no"),
        (b"x-compute-type", COMPUTE_TYPE),
        (b"x-compute-characters", str(len(request.inputs)).encode()),
    ]
    return StreamFormat(headers, errors.render_event, keep_alive=KEEP_ALIVE, head_first=True)


async def _prepare(exchange: Exchange, services: Services, request: GenerateRequest, streaming: bool) -> Generation:
    """Validate in the router's order and prepare the generation."""
    p = request.parameters

    async def resolve() -> Target:
        return services.router.resolve(p.adapter_id)

    try:
        if (
            exchange.status
        ):  # a stream that has begun waits here for a deployment's first start, others before they begin
            left_s = services.time_left_s(exchange.standing)
            target = await services.router.when_known(exchange.permit_holder, resolve, left_s)
        else:
            target = await resolve()
    except ModelNotFound as error:
        raise invalid(
            f"`adapter_id`: the adapter {(p.adapter_id or '')[:100]!r} was not found", "adapter_id"
        ) from error
    total = target.info.max_model_len
    validate(request, services.limits, total, streaming)
    ids = await target.tokenizer.encode(TextPrompt(request.inputs), p.truncate, limit=total)
    validate_length(ids, p, total)
    grammar = grammar_of(p.grammar)
    with_tokens = streaming or p.details or p.decoder_input_details or bool(p.best_of)
    internal = generation_request(request, TokenPrompt(ids), grammar, with_tokens)
    return await services.generator.prepare(internal, exchange, "tgi")


class GenerateReply(Reply):
    """The response of the generate routes: one frame per token, or the best sequence with the others in its details."""

    def __init__(
        self, request: GenerateRequest, generation: Generation, started: float, *, as_list: bool, full_text: bool
    ) -> None:
        """`started` is in monotonic seconds."""
        self._request, self._generation, self._started, self._as_list = request, generation, started, as_list
        before = request.inputs if full_text else ""
        self._sequences = [Sequence(generation, request, index, before) for index in range(generation.request.n)]

    def chunks(self, delta: Delta) -> list[bytes]:
        """One frame per token; the last one has the whole text."""
        return [event(frame) for frame in self._sequences[delta.index].frames(delta)]

    def add(self, delta: Delta) -> None:
        self._sequences[delta.index].add(delta)

    def whole(self) -> Response:
        """The response for the best sequence, the others in its details."""
        best, *others = self._sequences
        if others:
            best, *others = sorted(self._sequences, key=lambda s: s.mean_logprob, reverse=True)
        value: dict[str, Any] = {"generated_text": best.text}
        if self._request.parameters.details or self._request.parameters.decoder_input_details:
            value["details"] = best.details()
            if others:
                value["details"]["best_of_sequences"] = [{"generated_text": s.text, **s.details()} for s in others]
        headers = _compute_headers(self._request, self._generation, time.monotonic() - self._started)
        return json_response([value] if self._as_list else value, headers=headers)


class Sequence:
    """One generated sequence in TGI's format."""

    def __init__(self, generation: Generation, request: GenerateRequest, index: int, before: str) -> None:
        """`before` is put before the generated text."""
        self.generation, self.request, self.index, self._before = generation, request, index, before
        self.tokens: list[dict[str, Any]] = []
        self.top_tokens: list[list[dict[str, Any]]] = []
        self.count = 0
        self.finish_reason = ""
        self._texts: list[str] = []
        self._logprob_sum = 0.0

    def add(self, delta: Delta) -> int:
        """Add a delta; returns its number of tokens."""
        special = self.generation.target.tokenizer.special_ids
        for i, token_id in enumerate(delta.token_ids):
            text, logprob = delta.token_texts[i], delta.logprobs[i] if delta.logprobs else None
            self.count += 1
            if token_id not in special:
                self._texts.append(text)
            if logprob is None:
                continue
            self._logprob_sum += logprob.logprob
            token = {"id": token_id, "text": text, "logprob": logprob.logprob, "special": token_id in special}
            self.tokens.append(token)
            if self.request.parameters.top_n_tokens:
                self.top_tokens.append([self._top(i, value) for i, value in logprob.top])
        if delta.finish_reason is not None:
            self.finish_reason = self._finish(delta)
        return len(delta.token_ids)

    def frames(self, delta: Delta) -> list[dict[str, Any]]:
        """The stream's frames for a delta."""
        before, added = self.count, self.add(delta)
        frames: list[dict[str, Any]] = []
        for i in range(len(self.tokens) - added, len(self.tokens)):
            frame: dict[str, Any] = {"index": before + 1 + len(frames), "token": self.tokens[i]}
            if self.top_tokens:
                frame["top_tokens"] = self.top_tokens[i]
            frames.append({**frame, "generated_text": None, "details": None})
        if self.finish_reason and frames:
            frames[-1]["generated_text"] = self.text
            if self.request.parameters.details:
                frames[-1]["details"] = {
                    "finish_reason": self.finish_reason,
                    "generated_tokens": self.count,
                    "seed": self.seed,
                    "input_length": self.generation.usage.prompt_tokens,
                }
        return frames

    @property
    def text(self) -> str:
        """`generated_text`."""
        return self._before + "".join(self._texts)

    @property
    def seed(self) -> int | None:
        """The seed of the sequence; null for greedy decoding."""
        if not self.request.parameters.sampling:
            return None
        return (self.generation.params.seed + self.index) & ((1 << 64) - 1)

    @property
    def mean_logprob(self) -> float:
        """Mean log-probability, by which `best_of` ranks."""
        return self._logprob_sum / max(1, self.count)

    def details(self) -> dict[str, Any]:
        """`details` of a response that is not streamed."""
        details: dict[str, Any] = {
            "finish_reason": self.finish_reason,
            "generated_tokens": self.count,
            "seed": self.seed,
            "prefill": self._prefill() if self.request.parameters.decoder_input_details else [],
            "tokens": encoded(self.tokens),
        }
        if self.top_tokens:
            details["top_tokens"] = encoded(self.top_tokens)
        return details

    def _finish(self, delta: Delta) -> str:
        """The finish reason; "length" has precedence over a stop at the last token, as in the router."""
        if self.count >= self.generation.params.max_tokens or delta.finish_reason == FinishReason.LENGTH:
            return "length"
        return "eos_token" if delta.ended_by_eos else "stop_sequence"

    def _prefill(self) -> msgspec.Raw:
        tokenizer, generation = self.generation.target.tokenizer, self.generation
        logprobs: list[float | None] = [None, *(t.logprob for t in generation.prompt_logprobs)]
        return encoded(
            {"id": token_id, "text": tokenizer.token_text(token_id), "logprob": logprob}
            for token_id, logprob in zip(generation.prompt_token_ids, logprobs, strict=False)
        )

    def _top(self, token_id: int, logprob: float) -> dict[str, Any]:
        tokenizer = self.generation.target.tokenizer
        special = token_id in tokenizer.special_ids
        return {"id": token_id, "text": tokenizer.token_text(token_id), "logprob": logprob, "special": special}


def _compute_headers(request: GenerateRequest, generation: Generation, total_s: float) -> Headers:
    """The router's x- headers: times in whole milliseconds."""
    timings, usage = generation.timings, generation.usage
    inference_s = max(0.0, timings.finished - timings.submitted - timings.queue_s)
    values = {
        "x-compute-type": COMPUTE_TYPE.decode(),
        "x-compute-time": f"{total_s:.6f}",
        "x-compute-characters": len(request.inputs),
        "x-total-time": round(total_s * 1e3),
        "x-validation-time": round((timings.submitted - timings.arrived) * 1e3),
        "x-queue-time": round(timings.queue_s * 1e3),
        "x-inference-time": round(inference_s * 1e3),
        "x-time-per-token": round(inference_s * 1e3 / max(1, usage.completion_tokens)),
        "x-prompt-tokens": usage.prompt_tokens,
        "x-generated-tokens": usage.completion_tokens,
    }
    return [(name.encode(), str(value).encode()) for name, value in values.items()]


def overloaded(services: Services) -> None:
    """Count a request refused without a permit."""
    services.metrics.refused("overloaded")


@contextmanager
def counted_permit(exchange: Exchange, services: Services) -> Iterator[None]:
    """Acquire a permit, and count requests refused before they reach an engine."""
    try:
        with services.admission.permit(exchange.permit_holder):
            yield
    except InvalidRequest:
        services.metrics.refused("validation")
        raise
    except Overloaded:
        overloaded(services)
        raise
