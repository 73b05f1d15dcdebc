"""One HTTP exchange: read the body, answer once or stream, and notice at once when the client has gone."""

from __future__ import annotations

import asyncio
import gc
import secrets
from contextlib import aclosing
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from inference.errors import MalformedBody, Overloaded, ServingError, Unavailable
from inference.http.offload import INLINE_BYTES, beside

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine

    Receive = Callable[[], Awaitable[dict[str, Any]]]
    Send = Callable[[dict[str, Any]], Awaitable[None]]

T = TypeVar("T")
Headers = list[tuple[bytes, bytes]]
KEEP_ALIVE_S = 15.0
REQUEST_ID_LIMIT = 128
MAX_ELEMENTS = 2_000_000
"""Commas and brackets of a body, those in its texts included: they bound how long it takes to decode."""
MAX_CONTAINERS = 100_000
"""Lists and objects in a body: each costs memory, and time whenever garbage is looked for."""
MAX_DEPTH = 128
"""Levels of a body: what walks through it afterwards may do so by recursion."""


class ClientGone(Exception):
    """The client hung up; nobody waits for an answer."""


class Response(msgspec.Struct):
    """A complete answer."""

    status: int
    body: bytes
    content_type: bytes = b"application/json"
    headers: Headers = []


def json_response(value: Any, status: int = 200, headers: Headers | None = None) -> Response:
    """A JSON answer."""
    return Response(status, msgspec.json.encode(value), headers=headers or [])


def retry_headers(error: ServingError) -> Headers:
    """When a client may try again, for the refusals that pass: in seconds, and in OpenAI's milliseconds."""
    if not isinstance(error, Overloaded | Unavailable):
        return []
    seconds = error.retry_after_s
    return [(b"retry-after", b"%d" % seconds), (b"retry-after-ms", b"%d" % (seconds * 1000))]


def parse_json(body: bytes, max_depth: int = MAX_DEPTH) -> dict[str, Any]:
    """A JSON object of at most so many levels; raises MalformedBody.

    Where an object has a key twice, the last one counts, at every level.
    """
    brackets = body.count(b"[") + body.count(b"{")
    if brackets + body.count(b",") > MAX_ELEMENTS:
        raise MalformedBody(f"The body has more than {MAX_ELEMENTS} elements.")
    collecting = brackets > MAX_CONTAINERS and gc.isenabled()
    if collecting:  # many objects at once would make the collector look through them again and again
        gc.disable()
    try:
        value = msgspec.json.decode(body)
        if not isinstance(value, dict):
            raise MalformedBody("The body must be a JSON object.")
        _check_nesting(value, max_depth)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise MalformedBody(f"The body is not valid JSON: {error}") from error
    except RecursionError as error:
        raise MalformedBody("The body is nested too deeply.") from error
    finally:
        if collecting:
            gc.enable()
    return value


def _check_nesting(value: Any, levels: int) -> None:
    """Raise MalformedBody for too many lists and objects, or too many within one another."""
    level, count = [value], 0
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
    """The client's own id where it is harmless to log and echo, else a new one."""
    given = headers.get(b"x-request-id", b"")[: REQUEST_ID_LIMIT + 1].decode("latin-1")
    if 0 < len(given) <= REQUEST_ID_LIMIT and given.isascii() and given.isprintable():
        return given
    return secrets.token_hex(16)


class Exchange:
    """One request and the means to answer it. `parameters` are the values of the route's path."""

    def __init__(self, scope: dict[str, Any], receive: Receive, send: Send) -> None:
        self.scope, self._receive, self._send = scope, receive, send
        self.method: str = scope["method"]
        self.path: str = scope["path"]
        self.headers: dict[bytes, bytes] = dict(scope["headers"])
        self.parameters: dict[str, str] = {}
        self.request_id = request_id_of(self.headers)
        self.tenant = ""
        """The public prefix of the API key that was used; empty where none is required."""
        self.answer_headers: Headers = []
        """Sent with every answer, errors and streams included."""
        self.status = 0
        self._json: dict[str, Any] | None = None
        self.body_bytes = 0
        """Once the body was read; tells what is worth a thread."""
        self._chunks, self._ended = 0, False

    def header(self, name: str) -> str | None:
        """A request header by its lower-case name."""
        value = self.headers.get(name.encode())
        return None if value is None else value.decode("latin-1")

    async def body(self) -> bytes:
        """The whole body; its size was limited before."""
        parts = []
        while True:
            message = await self._receive()
            if message["type"] == "http.disconnect":
                raise ClientGone
            parts.append(message.get("body", b""))
            if not message.get("more_body"):
                whole = b"".join(parts)
                self.body_bytes = len(whole)
                return whole

    async def json(self) -> dict[str, Any]:
        """The body as a JSON object, whatever Content-Type says; raises MalformedBody. May be asked for again."""
        if self._json is None:
            self._json = await self.work(parse_json, await self.body())
        return self._json

    async def work(self, function: Callable[..., T], *arguments: Any) -> T:
        """`function` of what the client sent: here where its body is small, else beside the event loop."""
        if self.body_bytes <= INLINE_BYTES:
            return function(*arguments)
        return await beside(function, *arguments)

    async def respond(self, response: Response) -> None:
        """Send a complete answer."""
        self.status = response.status
        headers = [
            (b"content-type", response.content_type),
            (b"content-length", str(len(response.body)).encode()),
            *response.headers,
            *self.answer_headers,
        ]
        await self._send({"type": "http.response.start", "status": response.status, "headers": headers})
        body = b"" if self.method == "HEAD" else response.body
        await self._send({"type": "http.response.body", "body": body})

    async def unless_gone(self, work: Coroutine[Any, Any, T]) -> T:
        """The result of `work`, which is cancelled when the client hangs up first; raises ClientGone then."""
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
        end: bytes = b"",
        end_after_error: bool = True,
    ) -> None:
        """Send `chunks` as they come, then `end`, after an error only with `end_after_error`.

        With `errors_before_head` the head waits for the first chunk, so that a ServingError until then is raised and
        becomes an ordinary answer; later ones are rendered into the stream. `keep_alive` is sent in long silences, where
        the dialect has something for that.
        """
        last = (end, end if end_after_error else b"")
        pump = asyncio.ensure_future(self._pump(chunks, headers, render_error, errors_before_head, last))
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
        last: tuple[bytes, bytes],
    ) -> None:
        """`last` is what ends the stream, and what does so after an error."""
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
                if not self.status:
                    raise
                await self._chunk(render_error(error))
                end = last[1]
            await self._start_stream(headers)
            self._ended = True
            await self._send({"type": "http.response.body", "body": end})

    async def _keep_alive(self, headers: Headers, frame: bytes) -> None:
        """A frame whenever nothing has been sent for a while; a task of its own, so that chunks cost nothing more."""
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
    """Cancel what still runs and wait for its end; a cancelled task's own error is the canceller's business."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
