"""A request at a prefill instance: its first token, and the way to the instance that goes on with it.

(1) What instances with roles cannot do is refused, (2) the first token is generated, (3) a request that ends with it is answered
as a whole; (4) any other one is handed over, and answered with what the stream has so far. A coordinator that hangs up ends
nothing here: it says so with stopInfer.
"""

from __future__ import annotations

import time
from contextlib import aclosing
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from inference.dialects.mindie.clocks import Clock, Timers
from inference.dialects.mindie.disaggregation.departure import pack, travelling
from inference.dialects.mindie.disaggregation.peers import PeerError
from inference.dialects.mindie.errors import ENQUEUE, MindieError, invalid
from inference.dialects.mindie.requests import MessageType, generation_request
from inference.errors import DeadlineExceeded, GenerationFailed
from inference.http.exchange import json_response

if TYPE_CHECKING:
    from collections.abc import Callable

    from inference.dialects.mindie.disaggregation.headers import Handover
    from inference.dialects.mindie.requests import InferenceRequest
    from inference.dialects.mindie.state import MindieState
    from inference.generation.deltas import Delta
    from inference.generation.generation import Generation
    from inference.http.exchange import Exchange
    from inference.services import Services

WITH_STOPS = (MessageType.OPENAI, MessageType.VLLM_OPENAI, MessageType.VLLM_OPENAI_COMP)
TIMED_OUT = "Engine callback timeout."
NO_TOKEN = "[P Node] Failed to get tokenIds from inferResponse."
NOT_SENT = "[P Node] Send D request failed:"


async def answer(
    exchange: Exchange,
    services: Services,
    state: MindieState,
    request: InferenceRequest,
    request_id: str,
    handover: Handover,
) -> None:
    """Generate the first token, hand the request over and answer."""
    began_us = time.time_ns() // 1000
    check_limits(request)
    request = travelling(request)
    wanted = replace(generation_request(request, state), first_only=True, hold=True)
    generation = await services.generator.prepare(wanted, exchange, "mindie")
    names = {request_id, *request.names}
    if any(state.running.knows(exchange.tenant, name) for name in names):
        raise MindieError(500, ENQUEUE + "Runtime request has been used before.")
    head = {"reqId": request_id, "isStream": request.stream}
    with state.running.entry(exchange.tenant, names, generation):
        first = _First(request, generation, state)
        await first.generate()
        if first.ended:
            release_of(generation)()
            await exchange.respond(json_response({**head, "isLastResp": True, "output": first.output}))
            return
        message = pack(request, request_id, generation, first.tokens, first.clock, began_us)
        await _send(exchange, state, handover, message, generation)
    if request.stream:
        head |= {"isLastResp": False, "output": first.output}
    await exchange.respond(json_response(head))


def release_of(generation: Generation) -> Callable[[], None]:
    """Releases the blocks of the prompt at the worker that holds them, if one does."""
    source = generation.held
    holder = None if source is None else generation.target.holder(f"{source.worker_id}@{source.epoch}")
    if source is None or holder is None:
        return lambda: None
    return partial(holder[1].release, source.transfer_id)


def check_limits(request: InferenceRequest) -> None:
    """Refuse what cannot be handed over; raises MindieError."""
    if request.beams:
        raise invalid("use_beam_search is not supported in dmi mode")
    if request.sequences != 1:
        raise invalid("n must be 1 in dmi mode")
    if request.logprobs is not None:
        raise invalid("logprobs is not supported in dmi mode")
    if request.form.kind not in WITH_STOPS and (request.sampling.stop or request.sampling.stop_token_ids):
        raise invalid("stop is not supported in dmi mode")


class _First:
    """The first token of a request, rendered."""

    def __init__(self, request: InferenceRequest, generation: Generation, state: MindieState) -> None:
        self._request, self._generation, self._state = request, generation, state
        self.clock = Clock(generation)
        self._reply = request.make_reply(request.form, state.settings, generation, self.clock)
        self._frames: list[bytes] = []
        self._last: Delta | None = None
        self.tokens: list[int] = []

    async def generate(self) -> None:
        """Run to the end of this instance's part; raises MindieError."""
        timers = Timers(self._generation, self._request.timeout_s, self._state.settings)
        known = len(self._request.generated)
        try:
            async with aclosing(self._generation.deltas()) as deltas:
                async for delta in deltas:
                    timers.token()
                    if known:  # the tokens of an earlier instance, which the client has
                        known = 0
                        self._render(delta)
                        continue
                    self.clock.tick()
                    self._frames += self._render(delta)
                    self.tokens += delta.token_ids
                    self._last = delta
        except DeadlineExceeded as error:
            raise MindieError(500, TIMED_OUT) from error
        except GenerationFailed as error:
            raise MindieError(500, NO_TOKEN) from error
        finally:
            timers.close()

    @property
    def ended(self) -> bool:
        """Whether the whole answer is there."""
        return self._last is None or self._last.finish_reason is not None

    @property
    def output(self) -> str:
        """The frames so far, or the whole answer where the request has ended."""
        if not self._request.stream:
            return self._reply.whole().body.decode() if self.ended else ""
        frames = b"".join(self._frames)
        if self.ended:
            frames += b"".join(self._reply.last_chunks()) + self._request.end
        return frames.decode()

    def _render(self, delta: Delta) -> list[bytes]:
        if self._request.stream:
            return list(self._reply.chunks(delta))
        self._reply.add(delta)
        return []


async def _send(
    exchange: Exchange, state: MindieState, handover: Handover, message: Any, generation: Generation
) -> None:
    """Hand the request over under the client's own key; raises MindieError."""
    instance = state.instance
    assert instance is not None
    message.pNodeAddr, message.pInstanceId = instance.roles.address, instance.roles.instance % (1 << 32)
    if generation.held is not None:
        message.kvSource = generation.held.text()
        instance.hold(message.reqId, release_of(generation))
    metadata = {"x-request-id": exchange.request_id}
    for name in ("authorization", "x-api-key"):
        key = exchange.header(name)
        if key is not None:
            metadata[name] = key
    try:
        await instance.peers.decode(handover.host, handover.port, message, metadata)
    except PeerError as error:
        instance.release(message.reqId)
        raise MindieError(500, NOT_SENT + error.reason) from error
