"""A request at a decode instance: taken over by gRPC, run to its end, and its results sent to the coordinator.

`DecodeService` (1) reads the message, and answers whether it can be used, (2) starts a task that outlives the call, which
(3) primes the reply with the tokens that the client has, and (4) sends every later frame; what cannot end here (5) is given
back with its tokens, so that it starts again elsewhere. It holds the request's permit until the end.
"""

from __future__ import annotations

import asyncio
from contextlib import ExitStack, aclosing
from dataclasses import replace
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote

import structlog
from google.protobuf import empty_pb2

from engine.address import AddressError, TcpAddress, parse
from inference.dialects.mindie.clocks import Clock, Timers
from inference.dialects.mindie.disaggregation import recompute
from inference.dialects.mindie.disaggregation.arrival import unpack
from inference.dialects.mindie.disaggregation.headers import address_of
from inference.dialects.mindie.disaggregation.peers import PACKAGE, PeerError
from inference.dialects.mindie.disaggregation.results import MAX_UNREAD_BYTES, Keyword
from inference.dialects.mindie.errors import ENQUEUE, MindieError, invalid, translated
from inference.dialects.mindie.protocol import prefill_and_decode_pb2 as pb
from inference.dialects.mindie.requests import generation_request
from inference.errors import DeadlineExceeded, GenerationFailed, Overloaded, ServingError, ShuttingDown, Unavailable
from inference.http.offload import in_thread_if
from inference.server.grpc_calls import Calls, Method

if TYPE_CHECKING:
    from engine.kv_transfer.handle import KvSource
    from inference.dialects.mindie.disaggregation.arrival import Arrived
    from inference.dialects.mindie.disaggregation.instance import Instance
    from inference.dialects.mindie.state import MindieState
    from inference.generation.caller import RpcCaller
    from inference.generation.generation import Generation
    from inference.server.grpc_calls import Timeouts
    from inference.services import Services

DECODE_SERVICE = f"{PACKAGE}.DecodeService"
PREFILL_SERVICE = f"{PACKAGE}.PrefillService"
FAILED = "Failed forward in for infer engine."
NOT_DECODE = "this node is not a decode node"
USED = ENQUEUE + "Runtime request has been used before."
UNREAD = "the results of this node are not read"
GIVEN_BACK = (Unavailable, ShuttingDown, Overloaded)
"""Errors after which another instance can go on."""
LOOPBACK = ("ipv4:127.", "ipv6:[::1]", "ipv6:%5B::1%5D")
"""How gRPC names callers on this machine."""
GRACE_S = 1.0
"""Seconds after a request's deadline in which its results must be gone."""
logger = structlog.get_logger(__name__)


def services_of(
    state: MindieState, instance: Instance, services: Services, timeouts: Timeouts, scope: str | None
) -> list[Calls]:
    """The two gRPC services of an instance; `scope` is that of the key with which a request is handed over, None: it needs none."""
    decoder = Decoder(state, instance, services)
    decode = {"DecodeRequestChannel": Method(pb.DecodeParameters, scope, decoder.decode, infers=True)}
    release = {"ReleaseKVCacheChannel": Method(pb.RequestId, None, decoder.release)}
    return [
        Calls(DECODE_SERVICE, decode, services, timeouts, _parts),
        Calls(PREFILL_SERVICE, release, services, timeouts, _parts),
    ]


def _parts(error: ServingError) -> tuple[str, str]:
    mapped = translated(error)
    codes = {401: "UNAUTHENTICATED", 403: "PERMISSION_DENIED", 422: "INVALID_ARGUMENT", 503: "UNAVAILABLE"}
    return codes.get(mapped.status, "INTERNAL"), mapped.message


class Decoder:
    """Runs the requests of other instances."""

    def __init__(self, state: MindieState, instance: Instance, services: Services) -> None:
        self._state, self._instance, self._services = state, instance, services

    async def decode(self, message: pb.DecodeParameters, caller: RpcCaller) -> pb.DecodeRequestResponse:
        """DecodeRequestChannel: start a request, or say why not."""
        try:
            await self._start(message, caller)
        except ServingError as error:
            self._state.metrics.failed()
            return pb.DecodeRequestResponse(isValidDecodeParameters=False, errorMessage=translated(error).message)
        return pb.DecodeRequestResponse(isValidDecodeParameters=True)

    async def release(self, message: pb.RequestId, caller: RpcCaller) -> Any:
        """ReleaseKVCacheChannel: the other instance has the blocks, or will not fetch them."""
        self._instance.release(message.reqId)
        return empty_pb2.Empty()

    async def _start(self, message: pb.DecodeParameters, caller: RpcCaller) -> None:
        state, instance = self._state, self._instance
        state.metrics.received()
        if not instance.roles.decodes:
            raise invalid(NOT_DECODE)
        state.check_accepting(self._services)
        if instance.results.unread_bytes >= MAX_UNREAD_BYTES:
            raise invalid(UNREAD)
        arrived = unpack(message, state)
        names = {arrived.request_id, *arrived.request.names}

        def check_unused() -> None:
            if any(state.running.knows(caller.tenant, name) for name in names):
                raise MindieError(500, USED)

        if arrived.request_id in instance.decoding:
            raise MindieError(500, USED)
        check_unused()
        left_s = state.settings.e2e_timeout_s - arrived.spent_s
        if left_s <= 0:
            raise MindieError(500, "Engine callback timeout: server e2eTimeout")
        with ExitStack() as stack:
            instance.decoding.add(arrived.request_id)
            stack.callback(instance.decoding.remove, arrived.request_id)
            stack.enter_context(self._services.admission.permit(caller.permit_holder))
            wanted = replace(
                generation_request(arrived.request, state),
                longest_s=left_s,
                source=near(arrived.source, caller.connection),
            )
            generation = await self._services.generator.prepare(wanted, caller, "mindie")
            check_unused()  # for it may have waited for a worker
            stack.enter_context(state.running.entry(caller.tenant, names, generation))
            run = Run(arrived, generation, state, instance, left_s)
            task = asyncio.create_task(_run(run, stack.pop_all()))
            instance.tasks.add(task)
            task.add_done_callback(instance.tasks.discard)


async def _run(run: Run, held: ExitStack) -> None:
    with held:
        await run.to_the_end()
    # Only now, for the coordinator may send the request again at once, and the first instance may not answer for long.
    await run.release()


def near(source: KvSource | None, connection: str) -> KvSource | None:
    """The source if its worker is on the caller's host, for this server's worker connects to it; None: the prompt is computed.
    `connection`: gRPC's name of the caller. Over TCP the workers' certificates prove both sides.
    """
    if source is None:
        return None
    try:
        address = parse(source.address)
    except AddressError:
        return None
    if isinstance(address, TcpAddress):
        host = f"[{address.host}]" if ":" in address.host else address.host
        return source if unquote(connection).partition(":")[2].rpartition(":")[0] == host else None
    return source if connection.startswith(LOOPBACK) else None


class Run:
    """One request of another instance."""

    def __init__(
        self, arrived: Arrived, generation: Generation, state: MindieState, instance: Instance, left_s: float
    ) -> None:
        self.arrived, self._generation, self._state, self._instance = arrived, generation, state, instance
        self._left_s = left_s
        generation.usage.cached_tokens = arrived.cached_tokens
        self._clock = Clock(generation)
        self._clock.resume(arrived.first_ms, arrived.decodes, arrived.batch_sizes, arrived.waits_us)
        request = arrived.request
        self._reply = request.make_reply(request.form, state.settings, generation, self._clock)
        self._tokens: list[int] = []

    async def to_the_end(self) -> None:
        """Send all results, or the error in their place."""
        try:
            async with asyncio.timeout(self._left_s + GRACE_S):
                await self._frames()
        except TimeoutError:
            logger.warning("results of a request were not read in time", request_id=self.arrived.request_id)
            self._state.metrics.failed()
        except ServingError as error:
            self._state.metrics.failed()
            self._fail(error)
        except Exception:  # outermost handler of this task: an unexpected error is logged here and told without details
            logger.exception("unhandled error", request_id=self.arrived.request_id)
            self._instance.results.add(self.arrived.results_id, Keyword.ERROR, FAILED.encode())

    async def release(self) -> None:
        """Tell the first instance that it need hold nothing; only known peers are called. Its worker knows already when the blocks
        have been fetched.
        """
        address = address_of(self.arrived.prefill_address, self._instance.port)
        if address is None or not self._instance.roles.is_peer(*address):
            return
        try:
            await self._instance.peers.release(*address, self.arrived.request_id)
        except PeerError as error:
            logger.info("release not told", request_id=self.arrived.request_id, code=error.code)

    async def _frames(self) -> None:
        arrived = self.arrived
        timers = Timers(self._generation, arrived.request.timeout_s, self._state.settings, arrived.spent_s)
        known = len(arrived.request.generated)
        try:
            async with aclosing(self._generation.deltas()) as deltas:
                async for delta in deltas:
                    timers.token()
                    if known:  # the client has what comes of these
                        known = 0
                        self._render(delta)
                        continue
                    self._clock.tick()
                    frames = self._render(delta)
                    if delta.finish_reason is not None:
                        await self._end(frames)
                    else:
                        for frame in frames:
                            await self._send(Keyword.DATA, frame)
                    self._tokens += delta.token_ids
        finally:
            timers.close()

    async def _end(self, frames: list[bytes]) -> None:
        """Send the last frames; only the very last one is marked so, for the coordinator ends with the first that is."""
        if not self.arrived.request.stream:
            whole = await in_thread_if(self._generation.heavy, self._reply.whole)
            await self._send(Keyword.LAST, whole.body)
            return
        end = self.arrived.request.end
        *earlier, last = [*frames, *self._reply.last_chunks(), *([end] if end else [])]
        for frame in earlier:
            await self._send(Keyword.DATA, frame)
        await self._send(Keyword.LAST, last)

    def _render(self, delta: Any) -> list[bytes]:
        if self.arrived.request.stream:
            return list(self._reply.chunks(delta))
        self._reply.add(delta)
        return []

    async def _send(self, keyword: Keyword, payload: bytes) -> None:
        await self._instance.results.send(self.arrived.results_id, keyword, payload)

    def _fail(self, error: ServingError) -> None:
        """Give the request back if another instance can go on, else tell the error."""
        results, name = self._instance.results, self.arrived.results_id
        lost = isinstance(error, GIVEN_BACK) or (isinstance(error, GenerationFailed) and error.worker_lost)
        if not lost:
            late = isinstance(error, DeadlineExceeded)
            results.add(name, Keyword.ERROR, (translated(error).message if late else FAILED).encode())
            return
        request = self.arrived.request
        tokens = [*request.generated, *self._tokens]
        body = recompute.body_of(request, self._generation.prompt_token_ids, tokens, self._clock)
        if body is None:
            results.add(name, Keyword.ERROR, recompute.UNSUPPORTED.encode())
        else:
            results.add(name, Keyword.RETRY, body)
