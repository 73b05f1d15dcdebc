"""The life of a gRPC call: authentication, permits and deadlines as for HTTP.

The key is checked, and an inference acquires its permit, when the call's metadata are there, before a byte of its
message is read. Every call is handled as a stream, which is the same on the wire: only then can the server decide
when, and for how long, it reads and writes. It knows no dialect: how an error is written, and whose key is asked for, are
parameters.
"""

from __future__ import annotations

import asyncio
import secrets
from collections import Counter
from contextlib import aclosing, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import grpc
import structlog
from google.protobuf.message import DecodeError

from inference.admission.permits import Admission
from inference.errors import InvalidRequest, Overloaded, ServingError, ShuttingDown
from inference.generation.caller import RpcCaller
from inference.http.auth import Credentials, deployment_of, tenant_of
from inference.http.exchange import retry_headers
from inference.http.refusals import log_refusal
from inference.telemetry import trace_context
from inference.telemetry.base import UNFOLLOWED
from inference.workers.scope import within

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterator
    from contextlib import AbstractContextManager

    from inference.services import Services
    from inference.telemetry.base import Call
    from inference.telemetry.trace_context import TraceContext
    from management.snapshot import ApiKeyEntry

    Context = Any  # grpc.aio.ServicerContext, which has no types
    Unary = Callable[[Any, RpcCaller], Awaitable[Any]]
    Answers = Callable[[Any, RpcCaller], AsyncGenerator[Any, None]]
    Stream = Callable[[AsyncIterator[Any], RpcCaller], AsyncGenerator[Any, None]]
    Render = Callable[[ServingError], tuple[str, str]]
    Authenticate = Callable[[dict[str, Any], str], ApiKeyEntry | None]

DRAIN_POLL_S = 0.5
MAX_QUERIES = 64
"""Calls other than inferences that may be read or answered at once."""
MAX_OPEN_QUERIES_EACH = 16
"""The same of those that need no key, of one connection: nobody keeps the health check from the others."""
logger = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Timeouts:
    """Seconds that a client may take to send a message, and to read one."""

    message_s: float
    slow_client_s: float


@dataclass(frozen=True, slots=True)
class Method:
    """One method of the service.

    `asked`: the request class, None for messages that are not read; `infers`: the call needs a permit. One of `unary` (a
    message for a message), `answers` (a stream of messages for a message) and `stream` (for a stream) is set.
    """

    asked: Any
    scope: str | None
    unary: Unary | None = None
    stream: Stream | None = None
    infers: bool = False
    answers: Answers | None = None


class NotReading(Exception):
    """The client did not read its responses within the limit."""


class Calls(grpc.GenericRpcHandler):
    """The calls of one service."""

    def __init__(
        self,
        name: str,
        methods: dict[str, Method],
        services: Services,
        timeouts: Timeouts,
        render: Render,
        authenticate: Authenticate | None = None,
    ) -> None:
        """`render` gives an error's status code, such as "NOT_FOUND", and its text. `authenticate` takes a call's metadata
        and the scope that its method needs, and returns the key, None without one, or raises a ServingError; by default it
        takes this server's API keys.
        """
        self._methods = {f"/{name}/{method}": call for method, call in methods.items()}
        self._services, self._timeouts, self._render = services, timeouts, render
        self._authenticate = authenticate or self._by_key
        self._streams = Admission(services.admission.max_concurrent_requests)
        self._queries = 0
        self._open_queries: Counter[str] = Counter()
        """By connection."""

    @property
    def scopes(self) -> dict[str, str | None]:
        """The scope that a key needs, by the full name of each method; None: no key is needed."""
        return {name: method.scope for name, method in self._methods.items()}

    def service(self, details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler | None:
        """Called once for each call, before its first message is read."""
        method = self._methods.get(details.method)
        if method is None:
            return None
        metadata = {str(key): value for key, value in details.invocation_metadata or ()}
        infers = method.infers or method.stream is not None or method.answers is not None
        try:
            request_id, key = self._admitted(metadata, method.scope)
            if method.stream is not None:  # every request on it is charged
                self._services.rates.check(key)
            elif infers:
                self._services.rates.admit(key)
        except ServingError as error:
            refusal = error

            async def refuse(_: Any, context: Context) -> None:
                await self._abort(context, refusal, details.method, request_id_in(metadata))

            return grpc.stream_stream_rpc_method_handler(refuse)

        async def run(_: Any, context: Context) -> None:
            caller = RpcCaller(request_id, tenant_of(key), str(context.peer()))
            handle = self._flow if method.stream else self._answer
            call = self._follow(details.method, metadata, request_id, context) if infers else UNFOLLOWED
            status = ""  # a call without one was cancelled
            try:
                if infers:
                    remaining_s = context.time_remaining()
                    caller.standing = self._services.standings.of(key, partial(_text_in, metadata), remaining_s)
                with within(deployment_of(key)):
                    await handle(method, caller, context)
                status = "OK"
            except ServingError as error:
                await self._abort(context, error, details.method, request_id)
            except NotReading:  # its permit is free again; the client receives the status when it continues to read
                logger.warning("client stopped reading; call ended", method=details.method)
                with suppress(grpc.aio.InternalError):  # or it disconnects instead
                    await context.abort(grpc.StatusCode.DEADLINE_EXCEEDED, "the client did not read its answers")
            except (asyncio.CancelledError, grpc.aio.AbortError):
                raise
            except Exception:  # outermost handler: an unexpected error is logged here and answered without details
                logger.exception("unhandled error", method=details.method)
                await context.abort(grpc.StatusCode.INTERNAL, "internal error")
            finally:
                aborted = context.code()
                call.end(aborted.name if isinstance(aborted, grpc.StatusCode) else status)

        return grpc.stream_stream_rpc_method_handler(run)

    def _follow(self, method: str, metadata: dict[str, Any], request_id: str, context: Context) -> Call:
        """Begin to follow a call; its trailers say as which part of which trace."""
        trace_context.enter(_trace_in(metadata))
        call = self._services.telemetry.rpc(method, request_id)
        if call.trace is not None:
            trace_context.enter(call.trace)
            context.set_trailing_metadata((("traceresponse", call.trace.header),))
        return call

    def _admitted(self, metadata: dict[str, Any], scope: str | None) -> tuple[str, ApiKeyEntry | None]:
        """The call's id and key; raises Unauthorized or Forbidden."""
        request_id = request_id_in(metadata)
        structlog.contextvars.bind_contextvars(request_id=request_id)
        return request_id, None if scope is None else self._authenticate(metadata, scope)

    def _by_key(self, metadata: dict[str, Any], scope: str) -> ApiKeyEntry | None:
        """One of this server's API keys."""
        services = self._services
        return services.authenticator.check(Credentials.in_metadata(metadata), scope, services.holder.current)

    async def _answer(self, method: Method, caller: RpcCaller, context: Context) -> None:
        """Handle a call with one message."""
        with self._permit(method, caller, context.peer()):
            request = None
            if method.asked is not None:
                try:
                    async with asyncio.timeout(self._timeouts.message_s):
                        request = await _read(method, context)
                except TimeoutError:
                    await context.abort(grpc.StatusCode.DEADLINE_EXCEEDED, "the message took too long")
                if request is None:
                    raise InvalidRequest("the call has no message")
            if method.answers is not None:
                await self._write_all(context, method.answers(request, caller))
                return
            unary = method.unary
            assert unary is not None
            if not method.infers:
                await self._write(context, await unary(request, caller))
                return
            time_left_s = self._services.time_left_s(caller.standing)
            answer = await self._services.router.when_known(caller.tenant, lambda: unary(request, caller), time_left_s)
            await self._write(context, answer)

    async def _flow(self, method: Method, caller: RpcCaller, context: Context) -> None:
        """Handle a streaming call; there is no deadline between messages. A server that drains answers what it has read, and
        ends the call, with UNAVAILABLE if the client may have sent more.
        """
        assert method.stream is not None
        admission, cut = self._services.admission, False

        async def requests() -> AsyncIterator[Any]:
            nonlocal cut
            while True:
                cut = admission.draining
                reading = asyncio.ensure_future(_read(method, context))
                try:
                    while not (await asyncio.wait({reading}, timeout=DRAIN_POLL_S))[0]:
                        if admission.draining:
                            cut = True
                            return
                    request = reading.result()
                    if request is None:
                        cut = False
                    if request is None or cut:
                        return
                finally:
                    reading.cancel()
                yield request
                del request, reading

        with self._streams.permit(caller.permit_holder):
            await self._write_all(context, method.stream(requests(), caller))
        if cut:
            raise ShuttingDown("The server is shutting down.")

    def _permit(self, method: Method, caller: RpcCaller, peer: str) -> AbstractContextManager[None]:
        """What a call with one message needs: answers that may go on for long take no place from short calls."""
        if method.infers:
            return self._services.admission.permit(caller.permit_holder)
        if method.answers is not None:
            return self._streams.permit(caller.permit_holder)
        return self._query(method) if method.scope is not None else self._open_query(peer)

    @contextmanager
    def _open_query(self, peer: str) -> Iterator[None]:
        if self._open_queries[peer] >= MAX_OPEN_QUERIES_EACH:
            raise Overloaded("too many queries of this connection at once")
        self._open_queries[peer] += 1
        try:
            yield
        finally:
            self._open_queries[peer] -= 1
            if not self._open_queries[peer]:
                del self._open_queries[peer]

    @contextmanager
    def _query(self, method: Method) -> Iterator[None]:
        if method.asked is not None and self._queries >= MAX_QUERIES:
            raise Overloaded("too many queries at once")
        self._queries += 1
        try:
            yield
        finally:
            self._queries -= 1

    async def _write_all(self, context: Context, answers: AsyncGenerator[Any, None]) -> None:
        """Write messages as they come; the iterator is closed also if the client goes."""
        async with aclosing(answers):
            async for answer in answers:
                await self._write(context, answer)

    async def _write(self, context: Context, answer: Any) -> None:
        """Write a message; waits for the transport."""
        try:
            async with asyncio.timeout(self._timeouts.slow_client_s):
                await context.write(answer.SerializeToString())
        except TimeoutError:
            raise NotReading from None

    async def _abort(self, context: Context, error: ServingError, method: str, request_id: str) -> None:
        code, text = self._render(error)
        self._services.metrics.answered(error)
        log_refusal(error, "gRPC", method, code, request_id)
        retry = tuple((name.decode(), value.decode()) for name, value in retry_headers(error))
        trailers = (*(context.trailing_metadata() or ()), *retry)
        await context.abort(grpc.StatusCode[code], text, trailers)


async def _read(method: Method, context: Context) -> Any:
    """The next message, None at the end."""
    data = await context.read()
    if data is grpc.aio.EOF:
        return None
    try:
        return method.asked.FromString(data)
    except DecodeError as error:
        raise InvalidRequest(f"the message is no {method.asked.DESCRIPTOR.full_name}") from error


def _text_in(metadata: dict[str, Any], name: str) -> str | None:
    value = metadata.get(name)
    return None if value is None else str(value)


def _trace_in(metadata: dict[str, Any]) -> TraceContext | None:
    given, state = metadata.get("traceparent"), metadata.get("tracestate")
    return trace_context.parse(None if given is None else str(given), None if state is None else str(state))


def request_id_in(metadata: dict[str, Any]) -> str:
    """The client's request id if it is safe to log, else a new one."""
    given = str(metadata.get("x-request-id", ""))
    harmless = 0 < len(given) <= 128 and given.isascii() and given.isprintable()
    return given if harmless else secrets.token_hex(16)
