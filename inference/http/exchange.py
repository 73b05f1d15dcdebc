"""One HTTP exchange: reads the body, sends one response or a stream, and detects a disconnect."""

from __future__ import annotations

import asyncio
import gc
import math
import secrets
from contextlib import aclosing
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec
import structlog

from inference.admission.standing import ANYBODY
from inference.errors import (
    EncodedBody,
    MalformedBody,
    NotAnObject,
    Overloaded,
    ServingError,
    StillRunning,
    Unavailable,
)
from inference.http.offload import INLINE_BYTES, in_thread
from inference.telemetry import trace_context
from inference.telemetry.base import UNFOLLOWED

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine

    from inference.telemetry.base import Call
    from inference.telemetry.trace_context import TraceContext

    Receive = Callable[[], Awaitable[dict[str, Any]]]
    Send = Callable[[dict[str, Any]], Awaitable[None]]

T = TypeVar("T")
Headers = list[tuple[bytes, bytes]]
KEEP_ALIVE_S = 15.0
LEAST_RETRY_S, MOST_RETRY_S = 1, 120
"""OpenAI's clients give up where they are told to wait for longer."""
REQUEST_ID_LIMIT = 128
MAX_ELEMENTS = 2_000_000
"""The limit of commas and brackets in a body, including those in strings; bounds decode time."""
MAX_CONTAINERS = 100_000
"""The limit of lists and objects in a body; bounds memory and garbage-collection time."""
MAX_DEPTH = 128
"""The deepest nesting of a body, so that later code may recurse."""


class ClientGone(Exception):
    """The client disconnected."""


class Response(msgspec.Struct):
    """A complete response."""

    status: int
    body: bytes
    content_type: bytes = b"application/json"
    headers: Headers = []
    reason: bytes = b""
    """The reason phrase of the status line; b"" for the usual one."""


def json_response(value: Any, status: int = 200, headers: Headers | None = None) -> Response:
    """A JSON response."""
    return Response(status, msgspec.json.encode(value), headers=headers or [])


def retry_headers(error: ServingError) -> Headers:
    """The retry headers of refusals: `Retry-After` in seconds and OpenAI's in milliseconds for those that pass, and whether
    to retry at all where the status does not say it.
    """
    headers = (
        [] if error.should_retry is None else [(b"x-should-retry", b"%s" % str(error.should_retry).lower().encode())]
    )
    if isinstance(error, Overloaded | Unavailable | StillRunning):
        seconds = min(max(error.retry_after_s, LEAST_RETRY_S), MOST_RETRY_S)
        headers += [
            (b"retry-after", b"%d" % math.ceil(seconds)),
            (b"retry-after-ms", b"%d" % math.ceil(seconds * 1000)),
        ]
    return headers


def parse_json(body: bytes, max_depth: int = MAX_DEPTH) -> dict[str, Any]:
    """A JSON object, nested at most `max_depth` levels deep; raises MalformedBody.

    If an object has a key twice, the last one counts, at every level.
    """
    value = parse_value(body, max_depth)
    if not isinstance(value, dict):
        raise NotAnObject("The body must be a JSON object.")
    return value


def parse_value(body: bytes, max_depth: int = MAX_DEPTH) -> Any:
    """Any JSON value, within the same limits; raises MalformedBody."""
    brackets = body.count(b"[") + body.count(b"{")
    if brackets + body.count(b",") > MAX_ELEMENTS:
        raise MalformedBody(f"The body has more than {MAX_ELEMENTS} elements.")
    collecting = brackets > MAX_CONTAINERS and gc.isenabled()
    if collecting:  # creating many objects at once would trigger the garbage collector again and again
        gc.disable()
    try:
        value = msgspec.json.decode(body)
        if isinstance(value, dict | list):
            _check_nesting(value, max_depth)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise MalformedBody(f"The body is not valid JSON: {error}") from error
    except RecursionError as error:
        raise MalformedBody("The body is nested too deeply.") from error
    finally:
        if collecting:
            gc.enable()
    return value


def _check_nesting(value: dict[str, Any] | list[Any], levels: int) -> None:
    """Raise MalformedBody for too many lists and objects, or for too deep nesting."""
    level: list[Any] = [value]
    count = 0
    for _ in range(levels):
        children = (item.values() if isinstance(item, dict) else item for item in level)
        level = [child for items in children for child in items if isinstance(child, dict | list)]
        if not level:
            return
        count += len(level)
        if count > MAX_CONTAINERS:
            raise MalformedBody(f"The body has more than {MAX_CONTAINERS} lists and objects.")
    raise MalformedBody(f"The body is nested too deeply: {levels} levels are allowed.")


def request_id_of(headers: dict[bytes, bytes]) -> str:
    """The client's request id if it is safe to log and echo, else a new one."""
    given = headers.get(b"x-request-id", b"")[: REQUEST_ID_LIMIT + 1].decode("latin-1")
    return given if is_request_id(given) else secrets.token_hex(16)


def trace_of(headers: dict[bytes, bytes]) -> TraceContext | None:
    """The trace context in a request's headers, or None."""
    given = headers.get(b"traceparent")
    if given is None:
        return None
    return trace_context.parse(given.decode("latin-1"), headers.get(b"tracestate", b"").decode("latin-1"))


def is_request_id(text: str) -> bool:
    """Whether a client's id is safe to log and echo."""
    return 0 < len(text) <= REQUEST_ID_LIMIT and text.isascii() and text.isprintable()


class Exchange:
    """One request and its response. `parameters` are the path parameters of the route."""

    def __init__(self, scope: dict[str, Any], receive: Receive, send: Send) -> None:
        self.scope, self._receive, self._send = scope, receive, send
        self.method: str = scope["method"]
        self.path: str = scope["path"]
        self.headers: dict[bytes, bytes] = dict(scope["headers"])
        self.parameters: dict[str, str] = {}
        self.request_id = request_id_of(self.headers)
        self.tenant = ""
        """The public prefix of the API key; "" if the route needs no key."""
        self.standing = ANYBODY
        self.answer_headers: Headers = []
        """Sent with every response, including errors and streams."""
        self.status = 0
        self.failed = False
        """Whether its stream has ended with an error."""
        self.call: Call = UNFOLLOWED
        self._json: dict[str, Any] | None = None
        self._body: bytes | None = None
        self.body_bytes = 0
        """Size of the body once read; decides whether work goes to a thread."""
        self._chunks, self._ended = 0, False

    def rename(self, request_id: str) -> None:
        """Use another id of this request, in its response and in the log."""
        named = (b"x-request-id", self.request_id.encode())
        self.answer_headers = [(b"x-request-id", request_id.encode()) if h == named else h for h in self.answer_headers]
        self.request_id = request_id
        structlog.contextvars.bind_contextvars(request_id=request_id)

    @property
    def permit_holder(self) -> str:
        """The tenant for permits: the API key, else the flow that the client names."""
        return self.tenant or self.standing.tenant.flow

    def tap(self, note: Callable[[dict[str, Any]], None]) -> None:
        """Call `note` with every message that is sent from now on."""
        send = self._send

        async def both(message: dict[str, Any]) -> None:
            note(message)
            await send(message)

        self._send = both

    def header(self, name: str) -> str | None:
        """A request header by its lower-case name."""
        value = self.headers.get(name.encode())
        return None if value is None else value.decode("latin-1")

    @property
    def trace(self) -> TraceContext | None:
        """The trace context that the client sent."""
        return trace_of(self.headers)

    @property
    def query(self) -> str:
        """The query string, without the question mark and not decoded."""
        text: bytes = self.scope.get("query_string", b"")
        return text.decode("latin-1")

    def inner(
        self,
        path: str,
        body: dict[str, Any],
        through: Callable[[Send], Send] | None = None,
        receive: Receive | None = None,
    ) -> Exchange:
        """The same request, already admitted, as one for another path with another body (JSON). `through` wraps what sends its
        response; `receive` tells of a disconnect instead of the client's own connection.
        """
        kept = [
            (name, value) for name, value in self.scope["headers"] if name not in (b"content-type", b"content-length")
        ]
        headers = [*kept, (b"content-type", b"application/json")]
        scope = {**self.scope, "path": path, "raw_path": path.encode(), "headers": headers}
        made = Exchange(scope, receive or self._receive, self._send if through is None else through(self._send))
        made.request_id, made.tenant, made.answer_headers = self.request_id, self.tenant, self.answer_headers
        made.standing = self.standing
        made.body_bytes, made._json = self.body_bytes, body
        return made

    async def body(self) -> bytes:
        """The whole body; its size is limited by the server. Cached."""
        if self._body is None and self._json is not None:  # an inner exchange
            self._body = msgspec.json.encode(self._json)
        if self._body is not None:
            return self._body
        parts = []
        while True:
            message = await self._receive()
            if message["type"] == "http.disconnect":
                raise ClientGone
            parts.append(message.get("body", b""))
            if not message.get("more_body"):
                whole = b"".join(parts)
                self.body_bytes, self._body = len(whole), whole
                return whole

    async def json(self) -> dict[str, Any]:
        """The body as a JSON object, regardless of Content-Type; raises MalformedBody or EncodedBody. Cached."""
        if self._json is None:
            try:
                self._json = await self.work(parse_json, await self.body())
            except MalformedBody as error:
                encoding = (self.header("content-encoding") or "identity").lower()
                if encoding == "identity":
                    raise
                raise EncodedBody(encoding) from error
        return self._json

    async def work(self, function: Callable[..., T], *arguments: Any) -> T:
        """Call `function` on the loop for small bodies, in a thread for large ones."""
        if self.body_bytes <= INLINE_BYTES:
            return function(*arguments)
        return await in_thread(function, *arguments)

    async def respond(self, response: Response) -> None:
        """Send a complete response."""
        self.status = response.status
        headers = [
            (b"content-type", response.content_type),
            (b"content-length", str(len(response.body)).encode()),
            *response.headers,
            *self.answer_headers,
        ]
        start = {"type": "http.response.start", "status": response.status, "headers": headers}
        await self._send(start | {"reason": response.reason} if response.reason else start)
        body = b"" if self.method == "HEAD" else response.body
        await self._send({"type": "http.response.body", "body": body})

    async def unless_gone(self, work: Coroutine[Any, Any, T]) -> T:
        """Await `work`; cancel it and raise ClientGone on disconnect."""
        task = asyncio.ensure_future(work)
        watch = asyncio.ensure_future(self._gone())
        try:
            await asyncio.wait({task, watch}, return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                raise ClientGone
            return task.result()
        finally:
            await _cancel(task, watch)

    async def stream(
        self,
        chunks: AsyncGenerator[bytes, None],
        *,
        headers: Headers,
        render_error: Callable[[ServingError], bytes],
        keep_alive: bytes | None,
        errors_before_head: bool = True,
        errors_in_stream: tuple[type[ServingError], ...] = (),
        end: bytes = b"",
        end_after_error: bool = True,
    ) -> None:
        """Stream `chunks`, then `end` (after an error only if `end_after_error`).

        With `errors_before_head` the status line waits for the first chunk, so that an early ServingError is raised
        and becomes an ordinary response; later errors are rendered into the stream, and so are `errors_in_stream` at any
        time. `keep_alive` is sent during long silences; None: nothing is.
        """
        last = (end, end if end_after_error else b"")
        pump = asyncio.ensure_future(
            self._pump(chunks, headers, render_error, errors_before_head, errors_in_stream, last)
        )
        watch = asyncio.ensure_future(self._gone())
        tasks: list[asyncio.Future[None]] = [pump, watch]
        if keep_alive is not None:
            tasks.append(asyncio.ensure_future(self._keep_alive(headers, keep_alive)))
        try:
            await asyncio.wait({pump, watch}, return_when=asyncio.FIRST_COMPLETED)
            if not pump.done():
                raise ClientGone
            pump.result()
        finally:
            await _cancel(*tasks)

    async def _pump(
        self,
        chunks: AsyncGenerator[bytes, None],
        headers: Headers,
        render_error: Callable[[ServingError], bytes],
        errors_before_head: bool,
        errors_in_stream: tuple[type[ServingError], ...],
        last: tuple[bytes, bytes],
    ) -> None:
        """`last` is the last chunk of the stream, and the last chunk after an error."""
        end = last[0]
        async with aclosing(chunks):
            if not errors_before_head:
                await self._start_stream(headers)
            try:
                async for chunk in chunks:
                    if not self.status:
                        await self._start_stream(headers)
                    await self._chunk(chunk)
            except ServingError as error:
                if not self.status and not isinstance(error, errors_in_stream):
                    raise
                await self._start_stream(headers)
                await self._chunk(render_error(error))
                end, self.failed = last[1], True
            await self._start_stream(headers)
            self._ended = True
            await self._send({"type": "http.response.body", "body": end})

    async def _keep_alive(self, headers: Headers, frame: bytes) -> None:
        """Send keep-alive frames during silence, from a task of their own."""
        sent = 0
        while True:
            await asyncio.sleep(KEEP_ALIVE_S / 2)
            if self._ended:
                return
            if sent == self._chunks:
                await self._start_stream(headers)
                await self._chunk(frame)
            sent = self._chunks

    async def _start_stream(self, headers: Headers) -> None:
        if not self.status:
            self.status = 200
            await self._send(
                {"type": "http.response.start", "status": 200, "headers": [*headers, *self.answer_headers]}
            )

    async def _chunk(self, body: bytes) -> None:
        self._chunks += 1
        await self._send({"type": "http.response.body", "body": body, "more_body": True})

    async def _gone(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass


async def _cancel(*tasks: asyncio.Future[Any]) -> None:
    """Cancel running tasks and wait for their end; their errors are ignored."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
