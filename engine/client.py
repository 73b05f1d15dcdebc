"""A connection to one engine worker, for asyncio programs. It moves token ids and never text.

The outputs of one step arrive in one frame and go to the queues of their requests. If a reader lags, its outputs are
merged, so nothing is lost and memory is bounded by what a request may generate, in its encoded form.
"""

from __future__ import annotations

import asyncio
from collections import deque
from contextlib import aclosing
from typing import TYPE_CHECKING, Literal, Protocol

import msgspec

from engine import messages
from engine.address import parse
from engine.casualties import Casualties
from engine.failures import Failure, FailureCode, FinishReason
from engine.greeting import NotGreeted, greet, read_frame
from engine.kv_transfer.messages import Fetch, Release
from engine.messages import (
    MALFORMED,
    NOBODY,
    PROTOCOL_VERSION,
    Abort,
    AdapterCommand,
    AdapterRef,
    Alive,
    Dead,
    Embed,
    Heartbeat,
    Hello,
    ModelInfo,
    Outputs,
    Reply,
    RequestOutput,
    Stats,
    StepHistograms,
    Submit,
    Tenant,
    frame,
)

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Awaitable

    from engine.adapters.failures import AdapterFailure
    from engine.kv_transfer.handle import KvSource
    from engine.network.credentials import Credentials
    from engine.sampling.params import SamplingParams

TICK_S = 1.0
SUSPECT_AFTER_S = 5.0
"""Seconds without a message after which a worker gets no new requests. Time in which this process was suspended does not count."""
DEAD_AFTER_S = 20.0
"""Seconds without a message after which a worker on this host counts as dead, counted in the same way."""
VANISHED_AFTER_S = 10.0
"""DEAD_AFTER_S of a worker on another host. Silence there is usually the network's; TCP has sent a lost segment a few times by then."""
MAX_MERGED = 32
"""Merged tokens after which further outputs stay encoded."""
_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(RequestOutput)


class EngineDead(Exception):
    """The worker has ended or does not answer; its requests are lost."""


class ReportObserver(Protocol):
    """Hears of a worker's reports as they arrive."""

    def reported(self, stats: Stats, held: int) -> None:
        """`held`: the client's requests that the worker has not ended."""


class _Collector:
    """Buffers one request's outputs for its reader, and merges them if the reader lags, unless it wants `steps` apart.

    Beyond MAX_MERGED tokens the outputs stay encoded, which takes about a tenth of the memory of decoded
    log-probabilities: 0.1 kB per token, and 13 bytes for each of its alternatives.
    """

    def __init__(self, message: Submit | Embed, steps: bool = False) -> None:
        self.message = message
        self._most_merged = 0 if steps else MAX_MERGED
        self.reached = len(message.generated) if isinstance(message, Submit) else 0
        """Output tokens that the worker has sent, and those that another had generated before."""
        self._pending: RequestOutput | None = None
        self._packed: deque[bytes] = deque()
        self._arrived = asyncio.Event()
        self.holds = isinstance(message, Submit) and bool(message.hold)
        self.begun = False
        self.failure: str | None = None

    @property
    def packed_bytes(self) -> int:
        """Bytes of encoded outputs that wait for the reader."""
        return sum(map(len, self._packed))

    def put(self, output: RequestOutput) -> None:
        self.begun = True
        self.reached += len(output.token_ids)
        if self._pending is None:
            self._pending = output
        elif self._packed or len(self._pending.token_ids) >= self._most_merged:
            self._packed.append(_encoder.encode(output))
        else:
            self._pending = _merge(self._pending, output)
        self._arrived.set()

    def fail(self, reason: str) -> None:
        self.failure = reason
        self._arrived.set()

    async def get(self) -> RequestOutput:
        """The outputs since the last call, merged, or the first part of them; raises EngineDead if no more
        will arrive.
        """
        await self._arrived.wait()
        if self._pending is None:
            raise EngineDead(self.failure)
        output, self._pending = self._pending, None
        while self._packed and (self._pending is None or len(self._pending.token_ids) < self._most_merged):
            later = _decoder.decode(self._packed.popleft())
            self._pending = later if self._pending is None else _merge(self._pending, later)
        if self.failure is None and self._pending is None:
            self._arrived.clear()
        return output


def _goes_on(output: RequestOutput) -> bool:
    """Whether the worker drains, and the request may go on at another one."""
    refused = output.error is not None and output.error.code is FailureCode.DRAINING
    return refused or (output.finish_reason is FinishReason.MOVED and output.source is None)


def _merge(first: RequestOutput, second: RequestOutput) -> RequestOutput:
    """Merge two outputs of one request."""
    second.token_ids = first.token_ids + second.token_ids
    for name in ("logprobs", "prompt_logprobs"):
        earlier, later = getattr(first, name), getattr(second, name)
        setattr(second, name, later if earlier is None else earlier + (later or []))
    if second.cached_tokens is None:
        second.cached_tokens, second.queue_s = first.cached_tokens, first.queue_s
    return second


class EngineClient:
    """Talks to the worker `worker_id` in `epoch` at its `address` (`engine.address`)."""

    def __init__(
        self,
        address: str,
        worker_id: str,
        epoch: int,
        casualties: Casualties | None = None,
        observer: ReportObserver | None = None,
        credentials: Credentials | None = None,
    ) -> None:
        """`casualties` counts the requests that were in flight at worker deaths; it may be shared with
        other clients. `credentials`: of this process, for a worker on another host.
        """
        self.address, self.worker_id, self.epoch = address, worker_id, epoch
        self._casualties, self._observer = casualties or Casualties(), observer
        self._credentials = credentials
        self._remote = False
        self.stats = Stats()
        self.histograms = StepHistograms()
        self.draining = False
        self._collectors: dict[int, _Collector] = {}
        self._calls: dict[int, asyncio.Future[AdapterFailure | None]] = {}
        self._next_request = 1
        self._model: ModelInfo | None = None
        self._failure: str | None = None
        self._died = False
        """Whether the worker died by itself, as opposed to a close by this client or an ordered stop."""
        self._silent_s = 0.0
        self._writer: asyncio.StreamWriter | None = None
        self._tasks: list[asyncio.Task[None]] = []

    async def connect(self) -> ModelInfo:
        """Connect and exchange greetings; raises EngineDead if the worker cannot be reached or is not the
        expected one.
        """
        try:
            hello = Hello(PROTOCOL_VERSION, self.worker_id, self.epoch)
            reader, self._writer, answer = await greet(self.address, hello, self._credentials)
        except NotGreeted as error:
            raise EngineDead(str(error)) from error
        self._remote = parse(self.address).remote
        self._model = answer.model
        self._tasks = [asyncio.create_task(self._read(reader)), asyncio.create_task(self._count_silence())]
        return answer.model

    @property
    def model(self) -> ModelInfo:
        """Facts about the worker's model; raises EngineDead before `connect`."""
        if self._model is None:
            raise EngineDead("not connected")
        return self._model

    @property
    def failure(self) -> str | None:
        """Why the worker cannot be used, or None."""
        return self._failure

    @property
    def usable(self) -> bool:
        """Whether the worker takes new requests: it has not failed and is not draining."""
        return self.failure is None and not self.draining

    @property
    def suspect(self) -> bool:
        """Whether no message has arrived for SUSPECT_AFTER_S: the worker may be hung or suspended."""
        return self._silent_s >= SUSPECT_AFTER_S

    @property
    def inflight(self) -> int:
        """Requests of this client that have not ended."""
        return len(self._collectors)

    def release_waiting(self) -> None:
        """Fail the requests without output yet, so that they can be submitted to another worker."""
        for collector in self._collectors.values():
            if not collector.begun:
                collector.fail("the worker does not answer")

    def next_request_id(self) -> int:
        """An id for `generate`, unique within the connection."""
        request_id, self._next_request = self._next_request, self._next_request + 1
        return request_id

    def generate(
        self,
        prompt_token_ids: list[int],
        params: SamplingParams,
        *,
        generated: list[int] | None = None,
        request_id: int | None = None,
        priority: int = 0,
        cache_salt: str = "",
        timeout_s: float | None = None,
        adapter: AdapterRef | None = None,
        tenant: Tenant = NOBODY,
        band: int = 0,
        hold: str = "",
        source: KvSource | None = None,
        age_s: float = 0.0,
        steps: bool = False,
    ) -> AsyncGenerator[RequestOutput, None]:
        """The outputs of one request until it ends. Closing the iterator early aborts the request in the engine.
        `generated`: the tokens that the sequence got from another worker; the outputs are those after them. `hold`,
        `source` and `age_s`: as in `Submit`. `steps`: what a reader that lags did not take comes step by step, not
        merged.
        """
        if request_id is None:
            request_id = self.next_request_id()
        tokens = list(generated or ())
        scope = (priority, cache_salt, timeout_s, adapter, tokens, tenant, band)
        return self._outputs(Submit(request_id, prompt_token_ids, params, *scope, hold, source, age_s), steps)

    def fetch(self, message: Fetch) -> None:
        """Let the worker fetch blocks ahead of the request that will need them. Without that it forgets them."""
        if self._failure is None:
            self._send(message)

    def release(self, transfer_id: str) -> None:
        """Let the worker give up the blocks that it holds for this transfer, or has fetched ahead; it may have ended."""
        if self._failure is None:
            self._send(Release([transfer_id]))

    def stop(self, request_id: int) -> None:
        """Stop a request of `generate`: its reader gets the outputs so far and then the finish reason "abort"."""
        collector = self._collectors.get(request_id)
        if collector is not None and self._failure is None:
            collector.put(RequestOutput(request_id, finish_reason=FinishReason.ABORT))
            self._send(Abort([request_id]))

    async def embed(self, message: Embed) -> RequestOutput:
        """The embeddings of the inputs, or the failure; the request's id is new. Cancelling this coroutine aborts it in the engine."""
        async with aclosing(self._outputs(message)) as outputs:
            return await anext(outputs)

    async def command(
        self, action: Literal["load", "pin", "unpin", "unload"], adapter: AdapterRef
    ) -> AdapterFailure | None:
        """Send an adapter command. Returns the reason if it fails, else None."""
        call_id = self.next_request_id()
        self._calls[call_id] = asyncio.get_running_loop().create_future()
        try:
            self._send(AdapterCommand(call_id, action, adapter))
            return await self._calls[call_id]
        finally:
            del self._calls[call_id]

    async def _outputs(self, message: Submit | Embed, steps: bool = False) -> AsyncGenerator[RequestOutput, None]:
        if self._casualties.refuses(message):
            failure = Failure(FailureCode.POISONOUS)
            yield RequestOutput(message.request_id, finish_reason=FinishReason.ERROR, error=failure)
            return
        collector = _Collector(message, steps)
        self._send(message)
        self._collectors[message.request_id] = collector
        finished = False
        try:
            while not finished:
                output = await collector.get()
                finished = output.finish_reason is not None
                if output.finish_reason in (FinishReason.STOP, FinishReason.LENGTH):
                    self._casualties.survived(message)
                yield output
        except EngineDead:
            if self._failure is None and self.suspect:  # a hung worker counts as dead, though its process has not ended
                self._note_death(collector, all_begun=False)
            raise
        finally:
            self._collectors.pop(message.request_id, None)
            if not finished and self._failure is None:
                self._send(Abort([message.request_id]))

    def close(self) -> Awaitable[object]:
        """Close the connection now, and return what waits for its end; the worker aborts what it computes for it."""
        for task in self._tasks:
            task.cancel()
        self._fail("the connection was closed", died=False)
        ending: list[Awaitable[None]] = [*self._tasks]
        if self._writer is not None:
            self._writer.close()  # not by a coroutine: one that is cancelled before it begins would leave it open
            ending.append(self._writer.wait_closed())
        return asyncio.gather(*ending, return_exceptions=True)

    def _send(self, message: messages.ToWorker) -> None:
        if self.failure is not None or self._writer is None:
            raise EngineDead(self._failure or "not connected")
        self._writer.write(frame(message))

    async def _read(self, reader: asyncio.StreamReader) -> None:
        try:
            while True:
                self._dispatch(messages.to_client.decode(await read_frame(reader)))
        except (OSError, asyncio.IncompleteReadError, *MALFORMED):
            self._fail("the worker closed the connection")

    async def _count_silence(self) -> None:
        """Count the seconds without a message. A late tick (suspended process, blocked loop) counts as one tick."""
        limit_s = VANISHED_AFTER_S if self._remote else DEAD_AFTER_S
        while self._failure is None:
            await asyncio.sleep(TICK_S)
            self._silent_s += TICK_S
            if self._silent_s >= limit_s:
                self._fail(f"no heartbeat for {limit_s:.0f} s")
            elif self._remote and self._failure is None:
                self._send(Alive())

    def _dispatch(self, message: messages.ToClient) -> None:
        self._silent_s = 0.0
        if isinstance(message, Outputs):
            self.histograms = message.histograms or self.histograms
            self._note_stats(message.stats, sum(output.finish_reason is not None for output in message.outputs))
            for output in message.outputs:
                collector = self._collectors.get(output.request_id)
                if collector is not None:  # else it was aborted meanwhile
                    if _goes_on(output) and not collector.holds:  # what holds blocks also moves if it loses them
                        self.draining = True  # as its next heartbeat will report
                    collector.put(output)
        elif isinstance(message, Heartbeat):
            self.draining = message.draining
            self.histograms = message.histograms or self.histograms
            self._note_stats(message.stats)
        elif isinstance(message, Reply):
            call = self._calls.get(message.call_id)
            if call is not None and not call.done():  # else its caller was cancelled
                call.set_result(message.error)
        elif isinstance(message, Dead):
            self._fail(message.reason)

    def _note_stats(self, stats: Stats, ended: int = 0) -> None:
        """`ended`: the requests of this client that end with the same message."""
        self.stats = stats
        if self._observer is not None:
            self._observer.reported(stats, max(0, self.inflight - ended))

    def _fail(self, reason: str, died: bool = True) -> None:
        if self._failure is None:
            self._failure, self._died = reason, died and not self.draining
        all_begun = all(collector.begun for collector in self._collectors.values())
        for collector in self._collectors.values():
            if self._died and collector.failure is None:  # all are noted before one of them is sent elsewhere
                self._note_death(collector, all_begun)
            collector.fail(self._failure)
        for call in self._calls.values():
            if not call.done():
                call.set_exception(EngineDead(self._failure))

    def _note_death(self, collector: _Collector, all_begun: bool) -> None:
        """`all_begun`: whether each request in flight had brought something when the worker was lost."""
        suspect = all_begun or not collector.begun
        self._casualties.died(collector.message, f"{self.worker_id} {self.epoch}", collector.reached, suspect)
