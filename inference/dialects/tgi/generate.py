"""POST /, /generate and /generate_stream."""

from __future__ import annotations

import time
from contextlib import aclosing, contextmanager
from typing import TYPE_CHECKING, Any

import msgspec

from inference.dialects.tgi import errors
from inference.dialects.tgi.embed import embed
from inference.dialects.tgi.errors import invalid
from inference.dialects.tgi.schema import (
    CompatGenerateRequest,
    GenerateRequest,
    generation_request,
    parse,
    validate,
    validate_length,
)
from inference.errors import InvalidRequest, ModelNotFound, Overloaded
from inference.generation.requests import TokenPrompt
from inference.http.exchange import json_response
from inference.http.offload import beside_if, encoded
from inference.http.sse import event

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Iterator

    from inference.generation.deltas import Delta
    from inference.generation.generate import Generation
    from inference.http.exchange import Exchange, Headers
    from inference.services import Services

KEEP_ALIVE = b":\n\n"
COMPUTE_TYPE = b"cpu"


async def compat(exchange: Exchange, services: Services) -> None:
    """POST /: the prompt comes back with the answer unless `return_full_text` says no; a list when not streamed."""
    value = await exchange.json()
    if services.router.resolve(None).info.embedding is not None:
        return await embed(exchange, services, value)
    request: CompatGenerateRequest = parse(value, CompatGenerateRequest)
    if request.parameters.return_full_text is None:
        request.parameters.return_full_text = True  # what the router does for a model without hub information
    if request.stream:
        await _stream(exchange, services, request)
    else:
        await _whole(exchange, services, request, as_list=True)


async def generate(exchange: Exchange, services: Services) -> None:
    """POST /generate."""
    await _whole(exchange, services, await exchange.work(parse, await exchange.json(), GenerateRequest), as_list=False)


async def generate_stream(exchange: Exchange, services: Services) -> None:
    """POST /generate_stream."""
    await _stream(exchange, services, await exchange.work(parse, await exchange.json(), GenerateRequest))


async def _prepare(exchange: Exchange, services: Services, request: GenerateRequest, streaming: bool) -> Generation:
    """Validate in the router's order and prepare the generation."""
    total = services.router.resolve(None).info.max_model_len
    validate(request, services.limits, total, streaming)
    p = request.parameters
    internal = generation_request(
        request, with_tokens=streaming or p.details or p.decoder_input_details or bool(p.best_of)
    )
    try:
        target = services.router.resolve(internal.model)
    except ModelNotFound as error:
        raise invalid(
            f"`adapter_id`: the adapter {(p.adapter_id or '')[:100]!r} was not found", "adapter_id"
        ) from error
    internal.prompt = TokenPrompt(await target.tokenizer.encode(internal.prompt, p.truncate, most=total))
    validate_length(len(internal.prompt.token_ids), p, total)
    return await services.generator.prepare(internal, exchange, "tgi")


async def _whole(exchange: Exchange, services: Services, request: GenerateRequest, as_list: bool) -> None:
    started = time.monotonic()
    with counted_place(exchange, services):
        generation = await _prepare(exchange, services, request, streaming=False)
        sequences = await exchange.unless_gone(_collect(generation, request))
    answer = await beside_if(generation.heavy, _told, request, sequences, as_list)
    headers = _compute_headers(request, generation, time.monotonic() - started)
    await exchange.respond(json_response(answer, headers=headers))


def _told(request: GenerateRequest, sequences: list[Sequence], as_list: bool) -> Any:
    """The best sequence, and the others with its details."""
    best, *others = sorted(sequences, key=lambda s: s.mean_logprob, reverse=True) if len(sequences) > 1 else sequences
    answer: dict[str, Any] = {"generated_text": best.text}
    if request.parameters.details or request.parameters.decoder_input_details:
        answer["details"] = best.details()
        if others:
            sequences_of_others = [{"generated_text": s.text, **s.details()} for s in others]
            answer["details"]["best_of_sequences"] = sequences_of_others
    return [answer] if as_list else answer


async def _stream(exchange: Exchange, services: Services, request: GenerateRequest) -> None:
    """Status 200 and frames whatever happens, as the router answers."""
    headers: Headers = [
        (b"content-type", b"text/event-stream"),
        (b"cache-control", b"no-cache"),
        (b"x-accel-buffering", b"no"),
        (b"x-compute-type", COMPUTE_TYPE),
        (b"x-compute-characters", str(len(request.inputs)).encode()),
    ]
    await exchange.stream(
        _frames(exchange, services, request),
        headers=headers,
        render_error=errors.render_event,
        keep_alive=KEEP_ALIVE,
        errors_before_head=False,
    )


async def _frames(exchange: Exchange, services: Services, request: GenerateRequest) -> AsyncGenerator[bytes, None]:
    """One frame per token; the last carries the whole text."""
    with counted_place(exchange, services):
        generation = await _prepare(exchange, services, request, streaming=True)
        sequence = Sequence(generation, request, 0)
        async with aclosing(generation.deltas()) as deltas:
            async for delta in deltas:
                for frame in sequence.frames(delta):
                    yield event(frame)


async def _collect(generation: Generation, request: GenerateRequest) -> list[Sequence]:
    sequences = [Sequence(generation, request, index) for index in range(generation.request.n)]
    async with aclosing(generation.deltas()) as deltas:
        async for delta in deltas:
            sequences[delta.index].add(delta)
    return sequences


async def collect_texts(generation: Generation) -> str:
    """The whole text of a generation with one sequence."""
    async with aclosing(generation.deltas()) as deltas:
        return "".join([delta.text async for delta in deltas])


class Sequence:
    """One generated sequence in TGI's terms."""

    def __init__(self, generation: Generation, request: GenerateRequest, index: int) -> None:
        self.generation, self.request, self.index = generation, request, index
        self.tokens: list[dict[str, Any]] = []
        self.top_tokens: list[list[dict[str, Any]]] = []
        self.count = 0
        self.finish_reason = ""
        self._texts: list[str] = []
        self._logprob_sum = 0.0

    def add(self, delta: Delta) -> int:
        """Take a delta in; returns how many tokens it had."""
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
        prompt = self.request.inputs if self.request.parameters.return_full_text else ""
        return prompt + "".join(self._texts)

    @property
    def seed(self) -> int | None:
        """What the sequence was sampled with; null when greedy."""
        if not self.request.parameters.sampling:
            return None
        return (self.generation.params.seed + self.index) & ((1 << 64) - 1)

    @property
    def mean_logprob(self) -> float:
        """What `best_of` compares."""
        return self._logprob_sum / max(1, self.count)

    def details(self) -> dict[str, Any]:
        """`details` of an unstreamed answer."""
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
        """The router's order: length wins, even where the last token ends the text."""
        if self.count >= self.generation.params.max_tokens or delta.finish_reason == "length":
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
    """TGI's failure counter for what found no place."""
    services.metrics.refused("overloaded")


@contextmanager
def counted_place(exchange: Exchange, services: Services) -> Iterator[None]:
    """A place, and TGI's failure counter for what is refused before an engine sees it."""
    try:
        with services.admission.place(exchange.tenant):
            yield
    except InvalidRequest:
        services.metrics.refused("validation")
        raise
    except Overloaded:
        overloaded(services)
        raise
