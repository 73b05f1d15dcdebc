"""Results that are polled: a request with `x-synchronous: false` runs in the background, and its output is kept for a while.

A result belongs to the API key that asked for it. Numbers, sizes and times are bounded.
"""

from __future__ import annotations

import asyncio
import re
import secrets
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import structlog

from inference.dialects.djl.errors import bad_request, render_inference
from inference.errors import InternalError, Overloaded, ServingError
from inference.http.exchange import Exchange, Response

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from inference.http.exchange import Headers

logger = structlog.get_logger(__name__)

MAX_RESULTS = 256
MAX_RESULTS_PER_TENANT = 64
MAX_BYTES = 4 << 20
"""The largest result."""
MAX_TOTAL_BYTES = 64 << 20
KEPT_S = 600.0
"""How long a result is kept after its end."""
NEXT_TOKEN = "x-next-token"
ATTRIBUTES = b"x-amzn-sagemaker-custom-attributes"
_TOKEN = re.compile(r"([0-9a-f]{32})(?:\.([0-9]{1,9}))?")
_ITEMS = re.compile(r"-?[0-9]{1,9}")


@dataclass(eq=False)
class Result:
    """The output of one request so far; `ended` is in monotonic seconds."""

    tenant: str
    status: int = 0
    content_type: bytes = b"application/json"
    chunks: list[bytes] = field(default_factory=list)
    size: int = 0
    ended: float | None = None
    task: asyncio.Task[None] | None = None
    delivered: bool = False
    """Whether all of it has been returned; it may be polled again while there is room."""

    def fail(self, error: ServingError) -> None:
        """The error is the result, or its last chunk if there are others."""
        response = render_inference(error)
        if not self.chunks:
            self.status, self.content_type = response.status, response.content_type
        self.chunks.append(response.body)


class Results:
    """The results of this process."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._results: dict[str, Result] = {}

    async def begin(self, exchange: Exchange, body: dict[str, Any], run: Callable[[Exchange], Awaitable[None]]) -> None:
        """Run in the background and answer with the token of the result; raises Overloaded if too many are kept.

        `run` gets an exchange whose responses are recorded, and may raise a ServingError.
        """
        self._forget_old()
        mine = [name for name, result in self._results.items() if result.tenant == exchange.tenant]
        full = len(mine) >= MAX_RESULTS_PER_TENANT
        if (full and not self._forget_delivered(mine)) or (
            len(self._results) >= MAX_RESULTS and not self._forget_delivered(list(self._results))
        ):
            raise Overloaded("Too many results are kept; poll for those that were asked for.")
        result, name = Result(exchange.tenant), secrets.token_hex(16)

        async def record(message: dict[str, Any]) -> None:
            self._record(result, message)

        recorded = exchange.inner(exchange.path, body, lambda send: record, _never)
        recorded.answer_headers, recorded.parameters = [], exchange.parameters
        result.task = asyncio.create_task(self._run(result, run, recorded))
        self._results[name] = result
        await exchange.respond(Response(200, b"", headers=_token_headers(name)))

    async def answer(self, exchange: Exchange, token: str, max_items: str | None) -> None:
        """The chunks of a result from the token on, at most `max_items`; 202 while there are none. The header x-next-token
        says where to go on, until all have been returned.
        """
        self._forget_old()
        match = _TOKEN.fullmatch(token)
        result = self._results.get(match[1]) if match else None
        if match is None or result is None or not secrets.compare_digest(result.tenant, exchange.tenant):
            raise bad_request(f"Invalid x-starting-token: {token[:100]}")
        if max_items is not None and not _ITEMS.fullmatch(max_items):
            raise bad_request("The header x-max-items must be an integer")
        first, limit = int(match[2] or 0), -1 if max_items is None else int(max_items)
        chunks = result.chunks[first:] if limit < 0 else result.chunks[first : first + limit]
        end = min(first, len(result.chunks)) + len(chunks)
        done = result.ended is not None and end >= len(result.chunks)
        result.delivered = result.delivered or done
        headers = [] if done else _token_headers(f"{match[1]}.{end}")
        status = result.status if chunks or done else 202
        await exchange.respond(Response(status, b"".join(chunks), result.content_type, headers))

    async def _run(self, result: Result, run: Callable[[Exchange], Awaitable[None]], recorded: Exchange) -> None:
        try:
            await run(recorded)
        except ServingError as error:
            result.fail(error)
        except Exception:  # outermost handler of the task
            logger.exception("unhandled error", path=recorded.path)
            result.fail(InternalError("internal error"))
        finally:
            result.ended = self._clock()

    def _record(self, result: Result, message: dict[str, Any]) -> None:
        """Take what would be sent to a client; raises InternalError if that is too much."""
        if message["type"] == "http.response.start":
            result.status = message["status"]
            result.content_type = dict(message["headers"]).get(b"content-type", result.content_type)
            return
        chunk = message.get("body", b"")
        if result.size + len(chunk) > MAX_BYTES:
            raise InternalError(f"The result is larger than {MAX_BYTES} bytes.")
        while sum(each.size for each in self._results.values()) + len(chunk) > MAX_TOTAL_BYTES:
            if self._forget_delivered(list(self._results)):
                continue
            raise InternalError("There is no room for the result. Poll for those that were asked for, and try again.")
        if chunk:
            result.chunks.append(chunk)
            result.size += len(chunk)

    def _forget_delivered(self, names: list[str]) -> bool:
        """Forget the oldest of these that has been returned; False if none has."""
        name = next((name for name in names if self._results[name].delivered), None)
        if name is not None:
            del self._results[name]
        return name is not None

    def _forget_old(self) -> None:
        now = self._clock()
        self._results = {
            name: result
            for name, result in self._results.items()
            if result.ended is None or now - result.ended < KEPT_S
        }


def _token_headers(token: str) -> Headers:
    return [(NEXT_TOKEN.encode(), token.encode()), (ATTRIBUTES, f"{NEXT_TOKEN}={token}".encode())]


async def _never() -> dict[str, Any]:
    """The client of a result is not connected, so it never disconnects."""
    await asyncio.get_running_loop().create_future()
    raise AssertionError
