"""The common path of MindIE's inference endpoints: acquire a permit, parse, generate, then stream frames or send one
body.

Each endpoint module turns a body into an `InferenceRequest` whose Reply renders deltas. Refusals are ordinary responses, also
for streams; failures of the engine are bare text in a stream, even if they are all of it.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from inference.dialects.mindie.errors import ENQUEUE, CallbackTimeout, MindieError, render_late
from inference.errors import DeadlineExceeded, GenerationFailed, MalformedBody, ServingError
from inference.generation.answer import Job, Monitor, StreamFormat, prepared
from inference.generation.answer import answer as answer_job
from inference.generation.beam_search import check_beams
from inference.generation.ending import EndCause
from inference.generation.requests import GenerationRequest, GrammarRequest, Prompt
from inference.http.exchange import ClientGone, parse_json

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from inference.dialects.mindie.parameters import Sampling
    from inference.dialects.mindie.state import MindieState
    from inference.generation.answer import Reply
    from inference.generation.generation import Generation
    from inference.http.exchange import Exchange, Headers
    from inference.services import Services
    from inference.workers.target import Target

STREAM_HEADERS: Headers = [(b"content-type", b"text/event-stream")]
IN_STREAM = (GenerationFailed, DeadlineExceeded)
"""MindIE has sent the status line of a stream before its engine fails or is too slow, also for the first token."""
LAST_PRIORITY = 5
SEED_BITS = 32
"""The width of a seed that the server chooses, as in MindIE: a client may send it back, so it must be in `seed`'s range."""
UNPARSED = "Failed to parse request context to json"


@dataclass(frozen=True, slots=True)
class InferenceRequest:
    """A parsed request."""

    target: Target
    prompt: Prompt
    sampling: Sampling
    max_tokens: int | None
    reply: Callable[[Generation, Clock], Reply]
    stream: bool = False
    sequences: int = 1
    logprobs: int | None = None
    truncate: int | None = None
    grammar: GrammarRequest | None = None
    names: set[str] = field(default_factory=set)
    """Additional ids under which the request can be stopped."""
    timeout_s: int | None = None
    priority: int | None = None
    """1 (highest) to 5 (lowest, the default and the priority of other dialects' requests)."""
    end: bytes = b""
    beams: bool = False


class Clock:
    """Token arrival times in milliseconds, as MindIE reports them."""

    def __init__(self, generation: Generation) -> None:
        self._generation, self._last = generation, 0.0
        self.prefill_ms: int | None = None
        self.decode_ms: int | None = None
        self.decodes: list[int] = []
        self.batch_sizes: list[int] = []
        self.waits_us: list[int] = []

    def tick(self) -> None:
        """Record a step."""
        now = time.monotonic()
        if self.prefill_ms is None and not self.batch_sizes:
            self.prefill_ms = round((now - self._generation.timings.submitted) * 1e3)
            self.waits_us.append(round(self._generation.timings.queue_s * 1e6))
        else:
            self.prefill_ms, self.decode_ms = None, round((now - self._last) * 1e3)
            self.decodes.append(self.decode_ms)
            self.waits_us.append(0)  # a running sequence has no queue time
        self.batch_sizes.append(self._generation.batch_size)
        self._last = now


async def body_of(exchange: Exchange, state: MindieState, wrong: str = UNPARSED) -> dict[str, object]:
    """The body as a JSON object; `wrong` is the endpoint's error text for anything else."""
    try:
        return await exchange.work(parse_json, await exchange.body(), state.settings.max_json_depth)
    except MalformedBody as error:
        raise MindieError(422, wrong) from error


@contextmanager
def counted(exchange: Exchange, services: Services, state: MindieState) -> Iterator[None]:
    """Acquire a permit for an inference request, and count it."""
    state.metrics.received()
    try:
        with services.admission.permit(exchange.tenant):
            yield
    except ClientGone:
        raise
    except ServingError:
        state.metrics.failed()
        raise


async def answer(
    exchange: Exchange, services: Services, state: MindieState, request: InferenceRequest, internal_id: str
) -> None:
    """Run a request and send its response."""
    names = {internal_id, *request.names}
    generation = await services.generator.prepare(_generation_request(request, state), exchange, "mindie")
    if any(state.running.knows(exchange.tenant, name) for name in names):
        raise MindieError(500, ENQUEUE + "Runtime request has been used before.")
    clock = Clock(generation)

    @contextmanager
    def monitor(_: list[Generation]) -> Iterator[Monitor]:
        timers = Timers(generation, request, state)

        def delta_came() -> None:
            timers.token()
            clock.tick()

        try:
            yield delta_came
        finally:
            timers.close()

    def render_error(error: ServingError) -> bytes:
        state.metrics.failed()
        return render_late(error)

    stream = StreamFormat(STREAM_HEADERS, render_error, end=request.end, end_after_error=False, in_stream=IN_STREAM)
    job = Job(
        prepared([generation]),
        lambda _: request.reply(generation, clock),
        stream if request.stream else None,
        monitor=monitor,
    )
    with state.running.entry(exchange.tenant, names, generation):
        await answer_job(exchange, job)


def _generation_request(request: InferenceRequest, state: MindieState) -> GenerationRequest:
    capacity, settings, sampling = state.capacity(request.target), state.settings, request.sampling
    longest = capacity.max_input_token_len
    left, right = request.truncate, None
    if settings.truncation == 1:
        left = min(left or longest, longest)
    elif settings.truncation == -1:
        right = longest
    logprobs = request.logprobs
    if logprobs is None and request.sequences > 1:
        logprobs = 0  # choices are sorted by it
    wanted = capacity.max_iter_times if request.max_tokens is None else request.max_tokens
    adapter = request.target.adapter
    internal = GenerationRequest(
        model=request.target.entry.name if adapter is None else f"{request.target.entry.name}:{adapter.name}",
        prompt=request.prompt,
        sampling=sampling.overrides(request.sequences, request.target.info.vocab_size, logprobs),
        grammar=request.grammar,
        max_tokens=min(wanted, capacity.max_iter_times),
        seed=secrets.randbits(SEED_BITS) if sampling.seed is None else sampling.seed,
        n=request.sequences,
        stop=sampling.stop,
        include_stop=sampling.include_stop,
        skip_special_tokens=sampling.skip_special_tokens,
        truncate_left=left,
        truncate_right=right,
        max_prompt_tokens=longest,
        use_model_defaults=False,
        priority=(request.priority or LAST_PRIORITY) - LAST_PRIORITY,
        beams=request.beams,
        longest_s=settings.e2e_timeout_s,
    )
    if request.beams:
        check_beams(internal)
    return internal


class Timers:
    """MindIE's three timers of a generation, on one loop handle; a token costs one clock reading."""

    def __init__(self, generation: Generation, request: InferenceRequest, state: MindieState) -> None:
        self._generation, self._loop = generation, asyncio.get_running_loop()
        now = self._loop.time()
        settings = state.settings
        self._end = (now + settings.e2e_timeout_s, "server e2eTimeout")
        self._between = (float(settings.token_timeout_s), "server tokenTimeout")
        if request.timeout_s is not None:
            self._between = min(self._between, (float(request.timeout_s), "client timeout"))
        self._last = now
        self._expired: str | None = None
        self._handle = self._loop.call_at(self._next[0], self._look)

    def token(self) -> None:
        """Record a token; raises CallbackTimeout if a timer ended the generation."""
        self._last = self._loop.time()
        if self._expired is not None:
            raise CallbackTimeout(self._expired)

    def close(self) -> None:
        """Cancel the timers."""
        self._handle.cancel()

    @property
    def _next(self) -> tuple[float, str]:
        return min(self._end, (self._last + self._between[0], self._between[1]))

    def _look(self) -> None:
        at, which = self._next
        if self._loop.time() < at:
            self._handle = self._loop.call_at(at, self._look)
            return
        self._expired = which
        self._generation.cancel(EndCause.DEADLINE)
