"""The common path of a response: a dialect parses a body into a Job, whose Reply renders deltas to bytes.

`answer` (1) prepares the job's generations, which may wait for a worker; errors up to here are ordinary responses unless the
stream has begun, (2) runs them, (3) streams what
the Reply renders for each delta, or sends the whole Reply at the end, (4) ends the generations when the client
disconnects. It knows no dialect.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager, aclosing, nullcontext
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from inference.errors import ServingError
from inference.generation.merging import merge
from inference.http.offload import in_thread, in_thread_if
from inference.http.refusals import log_refusal

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Awaitable, Iterable

    from inference.generation.deltas import Delta
    from inference.generation.generation import Generation
    from inference.generation.requests import GenerationRequest
    from inference.http.exchange import Exchange, Headers, Response
    from inference.services import Services


INLINE_SEQUENCES = 16
"""A response with more sequences is encoded in a thread."""


class Reply(ABC):
    """Renders one response. A delta belongs to sequence `delta.index` of generation `delta.prompt`."""

    @abstractmethod
    def chunks(self, delta: Delta) -> Iterable[bytes]:
        """The chunks of the stream for this delta."""

    def heavy(self, delta: Delta) -> bool:
        """Whether the chunks for this delta are so large that they are rendered in a thread."""
        return False

    @abstractmethod
    def add(self, delta: Delta) -> None:
        """Add a delta to the whole response."""

    @abstractmethod
    def whole(self) -> Response:
        """The complete response; may be called in any thread."""

    def last_chunks(self) -> Iterable[bytes]:
        """The chunks of the stream after the last delta."""
        return ()

    def error_chunk(self, error: ServingError) -> bytes | None:
        """An error in the stream, if its form depends on the response so far; None leaves it to the StreamFormat."""
        return None


class WholeReply(Reply):
    """A response of a route that never streams: its jobs have no StreamFormat."""

    def chunks(self, delta: Delta) -> Iterable[bytes]:
        """Raises TypeError: the job has a StreamFormat all the same."""
        raise TypeError(f"{type(self).__name__} cannot be streamed")


@dataclass(frozen=True, slots=True)
class StreamFormat:
    """A dialect's stream format.

    `keep_alive` is sent during long silences; None: nothing is. `end` is the last chunk, after an error only with
    `end_after_error`. With `head_first` the status line is sent before anything is prepared, so that every error is a
    chunk of a stream with status 200; of the errors in `in_stream` that is true also without it, if they come after the
    preparation.
    """

    headers: Headers
    render_error: Callable[[ServingError], bytes]
    keep_alive: bytes | None = None
    end: bytes = b""
    end_after_error: bool = True
    head_first: bool = False
    in_stream: tuple[type[ServingError], ...] = ()


Monitor = Callable[[], None]
"""Called with every delta; may raise an error that ends the response."""


def unmonitored(generations: list[Generation]) -> AbstractContextManager[Monitor]:
    """The default monitor; does nothing."""
    return nullcontext(lambda: None)


@dataclass(frozen=True, slots=True)
class Job:
    """A parsed request.

    `prepare` returns the generations; `permit` is held while they are prepared and run, unless the handler holds one;
    `monitor` is called with every delta.
    """

    prepare: Callable[[], Awaitable[list[Generation]]]
    reply: Callable[[list[Generation]], Reply]
    stream: StreamFormat | None = None
    """None: one complete response."""
    permit: Callable[[], AbstractContextManager[None]] = nullcontext
    monitor: Callable[[list[Generation]], AbstractContextManager[Monitor]] = unmonitored


def preparing(
    requests: list[GenerationRequest], exchange: Exchange, services: Services, dialect: str
) -> Callable[[], Awaitable[list[Generation]]]:
    """A `Job.prepare` that prepares these requests."""

    async def prepare() -> list[Generation]:
        return [await services.generator.prepare(request, exchange, dialect) for request in requests]

    return prepare


def prepared(generations: list[Generation]) -> Callable[[], Awaitable[list[Generation]]]:
    """A `Job.prepare` that returns existing generations."""

    async def prepare() -> list[Generation]:
        return generations

    return prepare


async def answer(exchange: Exchange, job: Job) -> None:
    """Run the job and send its response; raises a ServingError as long as nothing has been sent."""
    form = job.stream
    if form is not None:
        prepared_job = _PreparedJob(job)

        def render_error(error: ServingError) -> bytes:
            reply = prepared_job.reply
            return (reply and reply.error_chunk(error)) or form.render_error(error)

        return await _stream(exchange, prepared_job.chunks(exchange), replace(form, render_error=render_error))
    with job.permit():
        generations = await exchange.unless_gone(_prepared(job))
        reply = job.reply(generations)
        await exchange.unless_gone(_collect(job, generations, reply))
        many = sum(generation.request.n for generation in generations) > INLINE_SEQUENCES
        heavy = many or any(generation.heavy for generation in generations)
        return await exchange.respond(await in_thread_if(heavy, reply.whole))


class _PreparedJob:
    """A job that is prepared inside its stream, so that a long wait for a worker is a silence of the stream."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self.reply: Reply | None = None

    async def chunks(self, exchange: Exchange) -> AsyncGenerator[bytes, None]:
        """The chunks of the stream. An error before the status line is raised, to become an ordinary response."""
        job = self._job
        try:
            with job.permit():
                generations = await job.prepare()
                self.reply = job.reply(generations)
                async with aclosing(_chunks(job, generations, self.reply)) as chunks:
                    async for chunk in chunks:
                        yield chunk
        except ServingError as error:
            if exchange.status and self.reply is None:
                log_refusal(error, exchange.method, exchange.path, exchange.status, exchange.request_id)
            raise


async def _prepared(job: Job) -> list[Generation]:
    return await job.prepare()


def deltas_of(generations: list[Generation]) -> AsyncGenerator[tuple[int, Delta], None]:
    """Merge the generations into (index of the generation, delta) pairs; the first error ends the merge."""
    return merge([generation.deltas() for generation in generations])


async def _stream(exchange: Exchange, chunks: AsyncGenerator[bytes, None], form: StreamFormat) -> None:
    await exchange.stream(
        chunks,
        headers=form.headers,
        render_error=form.render_error,
        keep_alive=form.keep_alive,
        errors_before_head=not form.head_first,
        errors_in_stream=form.in_stream,
        end=form.end,
        end_after_error=form.end_after_error,
    )


async def _chunks(job: Job, generations: list[Generation], reply: Reply) -> AsyncGenerator[bytes, None]:
    with job.monitor(generations) as monitor:
        async with aclosing(deltas_of(generations)) as deltas:
            async for _, delta in deltas:
                monitor()
                heavy = reply.heavy(delta)
                for chunk in await in_thread(_rendered, reply, delta) if heavy else reply.chunks(delta):
                    yield chunk
    for chunk in reply.last_chunks():
        yield chunk


def _rendered(reply: Reply, delta: Delta) -> list[bytes]:
    return list(reply.chunks(delta))


async def _collect(job: Job, generations: list[Generation], reply: Reply) -> None:
    with job.monitor(generations) as monitor:
        async with aclosing(deltas_of(generations)) as deltas:
            async for _, delta in deltas:
                monitor()
                reply.add(delta)
