"""The common path of MindIE's inference endpoints: acquire a permit, parse, generate, then stream frames or send one
body.

Each endpoint module turns a body into an `InferenceRequest` whose Reply renders deltas. Refusals are ordinary responses, also
for streams; failures of the engine are bare text in a stream, even if they are all of it.
"""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from inference.dialects.mindie.clocks import Clock, Timers
from inference.dialects.mindie.disaggregation import prefill
from inference.dialects.mindie.disaggregation.headers import RoleHeaders, read_headers
from inference.dialects.mindie.disaggregation.recompute import Begun, unpack
from inference.dialects.mindie.errors import ENQUEUE, MindieError, render_late
from inference.dialects.mindie.requests import generation_request
from inference.errors import DeadlineExceeded, GenerationFailed, MalformedBody, ServingError, Starting
from inference.generation.answer import Job, Monitor, Reply, StreamFormat, prepared
from inference.generation.answer import answer as answer_job
from inference.http.exchange import ClientGone, parse_json

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from inference.dialects.mindie.requests import InferenceRequest
    from inference.dialects.mindie.state import MindieState
    from inference.generation.deltas import Delta
    from inference.generation.generation import Generation
    from inference.http.exchange import Exchange, Headers, Response
    from inference.services import Services

STREAM_HEADERS: Headers = [(b"content-type", b"text/event-stream")]
IN_STREAM = (GenerationFailed, DeadlineExceeded)
"""MindIE has sent the status line of a stream before its engine fails or is too slow, also for the first token."""
UNPARSED = "Failed to parse request context to json"


async def body_of(exchange: Exchange, state: MindieState, wrong: str = UNPARSED) -> dict[str, Any]:
    """The body as a JSON object; `wrong` is the endpoint's error text for anything else."""
    try:
        # The vendor's parser counts what is around an object or list, so the outermost one has depth 0.
        return await exchange.work(parse_json, await exchange.body(), state.settings.max_json_depth + 1)
    except MalformedBody as error:
        raise MindieError(422, wrong) from error


@dataclass(slots=True)
class Incoming:
    """An inference request that has a permit."""

    exchange: Exchange
    services: Services
    state: MindieState
    headers: RoleHeaders
    _begun: Begun | None = None

    async def body(self, wrong: str = UNPARSED) -> dict[str, Any]:
        """The body as a JSON object, with an ordinary input also where a begun request is sent again."""
        body = await body_of(self.exchange, self.state, wrong)
        if self.headers.is_recompute:
            self._begun = await self.exchange.work(unpack, body)
        return body if self._begun is None else self._begun.body

    async def answer(self, request: InferenceRequest, internal_id: str) -> None:
        """Run a request and send its response."""
        if self._begun is not None:
            request = self._begun.resumed(request)
        handover = self.headers.handover
        if handover is None:
            await _answer(self.exchange, self.services, self.state, request, internal_id)
        else:
            await prefill.answer(self.exchange, self.services, self.state, request, internal_id, handover)


@contextmanager
def counted(exchange: Exchange, services: Services, state: MindieState) -> Iterator[Incoming]:
    """Acquire a permit for an inference request, and count it; its headers are read if instances have roles. A request that
    waits for its deployment runs again, and is counted once.
    """
    if exchange in state.held:
        state.held.discard(exchange)
    else:
        state.metrics.received()
    try:
        with services.admission.permit(exchange.permit_holder):
            headers = RoleHeaders() if state.instance is None else read_headers(exchange, state.instance)
            yield Incoming(exchange, services, state, headers)
    except ClientGone:
        raise
    except Starting:
        _hold(exchange, state)
        raise
    except ServingError:
        state.metrics.failed()
        raise


def _hold(exchange: Exchange, state: MindieState) -> None:
    """The request waits; a response that it gets before it runs again is a refusal."""

    def note(_: dict[str, Any]) -> None:
        if exchange in state.held:
            state.held.discard(exchange)
            state.metrics.failed()

    state.held.add(exchange)
    exchange.tap(note)


async def _answer(
    exchange: Exchange, services: Services, state: MindieState, request: InferenceRequest, internal_id: str
) -> None:
    names = {internal_id, *request.names}
    generation = await services.generator.prepare(generation_request(request, state), exchange, "mindie")
    if any(state.running.knows(exchange.tenant, name) for name in names):
        raise MindieError(500, ENQUEUE + "Runtime request has been used before.")
    clock = Clock(generation)

    @contextmanager
    def monitor(_: list[Generation]) -> Iterator[Monitor]:
        timers = Timers(generation, request.timeout_s, state.settings)
        known = bool(request.generated)

        def delta_came() -> None:
            nonlocal known
            timers.token()
            if not known:
                clock.tick()
            known = False

        try:
            yield delta_came
        finally:
            timers.close()

    def render_error(error: ServingError) -> bytes:
        state.metrics.failed()
        return render_late(error)

    def make_reply(_: list[Generation]) -> Reply:
        reply = request.make_reply(request.form, state.settings, generation, clock)
        return _Resumed(reply) if request.generated else reply

    stream = StreamFormat(STREAM_HEADERS, render_error, end=request.end, end_after_error=False, in_stream=IN_STREAM)
    job = Job(
        prepared([generation]),
        make_reply,
        stream if request.stream else None,
        monitor=monitor,
    )
    with state.running.entry(exchange.tenant, names, generation):
        await answer_job(exchange, job)


class _Resumed(Reply):
    """The reply of a request that is sent again. The client has what comes of the first delta, the tokens of an earlier instance:
    it is rendered only for the sake of what follows.
    """

    def __init__(self, reply: Reply) -> None:
        self._reply, self._known = reply, True

    def chunks(self, delta: Delta) -> Iterable[bytes]:
        chunks = list(self._reply.chunks(delta))
        known, self._known = self._known, False
        return [] if known else chunks

    def heavy(self, delta: Delta) -> bool:
        return self._reply.heavy(delta)

    def add(self, delta: Delta) -> None:
        self._reply.add(delta)

    def whole(self) -> Response:
        return self._reply.whole()

    def last_chunks(self) -> Iterable[bytes]:
        return self._reply.last_chunks()

    def error_chunk(self, error: ServingError) -> bytes | None:
        return self._reply.error_chunk(error)
