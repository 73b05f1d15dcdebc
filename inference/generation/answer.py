"""One way to answer: a dialect parses a body into a Job, and the Job's Reply turns deltas into bytes.

`answer` (1) prepares the job's generations, where every refusal is still an ordinary answer, (2) runs them, (3) sends
what the Reply makes of each delta as a stream, or the whole Reply at the end, (4) ends the generations when the client
leaves. It knows no dialect.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager, aclosing, nullcontext
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from inference.errors import ServingError
from inference.generation.merging import merge
from inference.http.offload import beside_if
from inference.http.refusals import log_refusal

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Awaitable, Iterable

    from inference.generation.deltas import Delta
    from inference.generation.generation import Generation
    from inference.generation.requests import GenerationRequest
    from inference.http.exchange import Exchange, Headers, Response
    from inference.services import Services


INLINE_SEQUENCES = 16
"""An answer with more of them is written beside the event loop."""


class Reply(ABC):
    """One answer as it grows. A delta belongs to sequence `delta.index` of generation `delta.prompt`."""

    @abstractmethod
    def chunks(self, delta: Delta) -> Iterable[bytes]:
        """What a stream sends for this delta, chunk by chunk."""

    @abstractmethod
    def add(self, delta: Delta) -> None:
        """Take a delta into the whole answer."""

    @abstractmethod
    def whole(self) -> Response:
        """The complete answer; any thread may call this."""

    def last_chunks(self) -> Iterable[bytes]:
        """What a stream sends behind the last delta."""
        return ()

    def error_chunk(self, error: ServingError) -> bytes | None:
        """An error in the stream, where it depends on the answer so far; None leaves it to the StreamFormat."""
        return None


@dataclass(frozen=True, slots=True)
class StreamFormat:
    """How a dialect streams. `keep_alive` is sent in long silences, None: nothing is; `end` is the last chunk, after an
    error only with `end_after_error`. With `head_first` the head is sent before anything is prepared, so that every
    error is a chunk of a stream with status 200.
    """

    headers: Headers
    render_error: Callable[[ServingError], bytes]
    keep_alive: bytes | None = None
    end: bytes = b""
    end_after_error: bool = True
    head_first: bool = False


Monitor = Callable[[], None]
"""Called with every delta; raises what ends the answer."""


def unmonitored(generations: list[Generation]) -> AbstractContextManager[Monitor]:
    """Nothing watches the generations."""
    return nullcontext(lambda: None)


@dataclass(frozen=True, slots=True)
class Job:
    """What a dialect made of a body.

    `prepare` gives the generations; `permit` is held while they are prepared and run, where the handler holds none;
    `monitor` watches them while they run.
    """

    prepare: Callable[[], Awaitable[list[Generation]]]
    reply: Callable[[list[Generation]], Reply]
    stream: StreamFormat | None = None
    """None: one whole answer."""
    permit: Callable[[], AbstractContextManager[None]] = nullcontext
    monitor: Callable[[list[Generation]], AbstractContextManager[Monitor]] = unmonitored


def preparing(
    requests: list[GenerationRequest], exchange: Exchange, services: Services, dialect: str
) -> Callable[[], Awaitable[list[Generation]]]:
    """`Job.prepare` of these requests."""

    async def prepare() -> list[Generation]:
        return [await services.generator.prepare(request, exchange, dialect) for request in requests]

    return prepare


def prepared(generations: list[Generation]) -> Callable[[], Awaitable[list[Generation]]]:
    """`Job.prepare` of generations that are there already."""

    async def prepare() -> list[Generation]:
        return generations

    return prepare


async def answer(exchange: Exchange, job: Job) -> None:
    """Run the job and send its answer; raises a ServingError as long as nothing was sent."""
    form = job.stream
    if form is not None and form.head_first:
        return await _stream(exchange, _late_chunks(exchange, job), form)
    with job.permit():
        generations = await job.prepare()
        reply = job.reply(generations)
        if form is not None:

            def render_error(error: ServingError) -> bytes:
                return reply.error_chunk(error) or form.render_error(error)

            own = replace(form, render_error=render_error)
            return await _stream(exchange, _chunks(job, generations, reply), own)
        await exchange.unless_gone(_collect(job, generations, reply))
        many = sum(generation.request.n for generation in generations) > INLINE_SEQUENCES
        heavy = many or any(generation.heavy for generation in generations)
        return await exchange.respond(await beside_if(heavy, reply.whole))


def deltas_of(generations: list[Generation]) -> AsyncGenerator[tuple[int, Delta], None]:
    """(number of the generation, delta) as they come; the first error ends all."""
    return merge([generation.deltas() for generation in generations])


async def _stream(exchange: Exchange, chunks: AsyncGenerator[bytes, None], form: StreamFormat) -> None:
    await exchange.stream(
        chunks,
        headers=form.headers,
        render_error=form.render_error,
        keep_alive=form.keep_alive,
        errors_before_head=not form.head_first,
        end=form.end,
        end_after_error=form.end_after_error,
    )


async def _late_chunks(exchange: Exchange, job: Job) -> AsyncGenerator[bytes, None]:
    """The chunks of a stream whose head is sent already."""
    try:
        with job.permit():
            generations = await job.prepare()
            async with aclosing(_chunks(job, generations, job.reply(generations))) as chunks:
                async for chunk in chunks:
                    yield chunk
    except ServingError as error:
        log_refusal(error, exchange.method, exchange.path, exchange.status, exchange.request_id)
        raise


async def _chunks(job: Job, generations: list[Generation], reply: Reply) -> AsyncGenerator[bytes, None]:
    with job.monitor(generations) as monitor:
        async with aclosing(deltas_of(generations)) as deltas:
            async for _, delta in deltas:
                monitor()
                for chunk in reply.chunks(delta):
                    yield chunk
    for chunk in reply.last_chunks():
        yield chunk


async def _collect(job: Job, generations: list[Generation], reply: Reply) -> None:
    with job.monitor(generations) as monitor:
        async with aclosing(deltas_of(generations)) as deltas:
            async for _, delta in deltas:
                monitor()
                reply.add(delta)
