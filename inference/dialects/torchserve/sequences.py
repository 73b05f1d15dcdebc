"""The requests of one StreamPredictions2 call: those of a sequence are answered in their order, sequences beside each other.

Errors are answers of the stream, which continues. When the client has sent its last request, the answers that are due
are still sent.
"""

from __future__ import annotations

import asyncio
import uuid
from collections import deque
from typing import TYPE_CHECKING, Any

import structlog
from google.protobuf.any_pb2 import Any as AnyMessage
from google.rpc.error_details_pb2 import ErrorInfo
from google.rpc.status_pb2 import Status
from grpc import StatusCode

from inference.dialects.torchserve.errors import TorchServeError, translated
from inference.dialects.torchserve.inputs import SEQUENCE_ID, SEQUENCE_START, flag
from inference.dialects.torchserve.protocol import inference_pb2 as pb
from inference.errors import InternalError, ServingError

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable

MAX_SEQUENCES = 64
"""Sequences of one call whose requests run at once."""
MAX_WAITING = 64
"""Requests of one call that are read and not answered yet."""
MAX_WAITING_BYTES = 1 << 20
"""Of those requests, unless it is a single one."""
MAX_UNWRITTEN = 8
NO_ID = "Parameter sequenceId is required."
logger = structlog.get_logger(__name__)


class Sequences:
    """The sequences of one call."""

    def __init__(self, answer: Callable[[Any], Awaitable[bytes]], strict: bool) -> None:
        """`answer` gives the prediction for one request, or raises a ServingError."""
        self._answer, self._strict = answer, strict
        self._due: dict[str, deque[Any]] = {}
        self._running: set[asyncio.Task[None]] = set()
        self._free = asyncio.Semaphore(MAX_WAITING)
        self._bytes, self._fewer = 0, asyncio.Event()
        self._slots = asyncio.Semaphore(MAX_SEQUENCES)
        self._told: asyncio.Queue[Any] = asyncio.Queue(MAX_UNWRITTEN)

    async def answers(self, requests: AsyncIterator[Any]) -> AsyncGenerator[Any, None]:
        """The responses, in order of arrival. Raises what reading the requests raises."""
        reader = asyncio.ensure_future(self._read(requests))
        try:
            while (response := await self._told.get()) is not None:
                if isinstance(response, Exception):
                    raise response
                yield response
        finally:
            reader.cancel()
            for task in self._running:
                task.cancel()
            await asyncio.gather(reader, *self._running, return_exceptions=True)

    async def _read(self, requests: AsyncIterator[Any]) -> None:
        """None in the queue marks the end."""
        try:
            async for request in requests:
                await self._free.acquire()
                await self._room_for(request.ByteSize())
                self._take(request)
                del request  # before the next one is read
            await asyncio.gather(*self._running)
            await self._told.put(None)
        except Exception as error:  # raised in the writer, which ends the stream
            await self._told.put(error)

    async def _room_for(self, size: int) -> None:
        """Wait until a request of this size may wait, too."""
        while self._bytes and self._bytes + size > MAX_WAITING_BYTES:
            self._fewer.clear()
            await self._fewer.wait()
        self._bytes += size

    def _take(self, request: Any) -> None:
        name = _sequence_of(request)
        if name in self._due:
            self._due[name].append(request)
            return
        self._due[name] = deque([request])
        task = asyncio.ensure_future(self._run(name))
        self._running.add(task)
        task.add_done_callback(self._running.discard)

    async def _run(self, name: str) -> None:
        """Answer what is due in one sequence, one request after the other."""
        async with self._slots:
            due = self._due[name]
            while due:
                await self._told.put(await self._response(due[0], name))
                self._bytes -= due.popleft().ByteSize()
                self._fewer.set()
                self._free.release()
            del self._due[name]

    async def _response(self, request: Any, name: str) -> Any:
        try:
            if not name:
                raise TorchServeError(NO_ID, "INTERNAL", "BadRequestException.()", 400)
            return pb.PredictionResponse(prediction=await self._answer(request), sequence_id=name)
        except ServingError as error:
            return self._failed(error, name)
        except Exception:  # outermost handler: the stream's other requests continue
            logger.exception("unhandled error", method="StreamPredictions2")
            return self._failed(InternalError("internal error"), name)

    def _failed(self, error: ServingError, name: str) -> Any:
        known = translated(error, self._strict)
        detail = AnyMessage()
        detail.Pack(ErrorInfo(reason=known.label))
        status = Status(code=StatusCode[known.code].value[0], message=known.message, details=[detail])
        return pb.PredictionResponse(status=status, sequence_id=name or None)


def _sequence_of(request: Any) -> str:
    """The request's sequence; a first request without a name gets one from the server."""
    if request.sequence_id:
        return str(request.sequence_id)
    given = request.input.get(SEQUENCE_ID, b"").decode("utf-8", "replace")
    if given:
        return str(given)
    return f"ts-seq-{uuid.uuid4()}" if flag(request.input, SEQUENCE_START) else ""
