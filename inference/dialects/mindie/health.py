"""The health endpoints of the management plane, and the check that most of its other endpoints start with."""

from __future__ import annotations

import asyncio
import re
from contextlib import aclosing
from typing import TYPE_CHECKING

from inference.dialects.mindie.errors import MindieError
from inference.errors import RouteNotFound, ServingError, Unavailable
from inference.generation.requests import GenerationRequest, SamplingOverrides, TokenPrompt
from inference.http.exchange import Response, json_response

if TYPE_CHECKING:
    from inference.dialects.mindie.state import MindieState
    from inference.http.exchange import Exchange
    from inference.services import Services

DEFAULT_WAIT_S, MAX_WAIT_S = 10, 600
TIMED = re.compile(r"(?:-([0-9]+))?")
HEALTHY = b'{"status":"healthy"}'
ABNORMAL = {"message": "Service is abnormal"}
NO_STATUS = "Failed to get health status."
UNLINKED = {"message": "DMI connection is unhealthy"}


class NotHealthy(ServingError):
    """No worker is available: 503 with an empty body."""


def check(services: Services, state: MindieState) -> None:
    """Raise an error while the service stops (MindieError), or if no worker is connected (NotHealthy)."""
    if state.stopping or services.admission.draining:
        raise MindieError(503, "The service has been stopped.")
    if not any(target.clients or target.asleep for target in state.router.targets):
        raise NotHealthy("")


async def live(exchange: Exchange, services: Services, state: MindieState) -> None:
    """GET /v2/health/live and /v2/health/ready: abnormal without a worker that has a recent heartbeat, or where
    a role needs links and none is good.
    """
    check(services, state)
    if not services.router.ready:
        answer = json_response(ABNORMAL, 500)
    elif _unlinked(state):
        answer = json_response(UNLINKED, 500)
    else:
        answer = Response(200, b"", b"")
    await exchange.respond(answer)


def _unlinked(state: MindieState) -> bool:
    """Whether the instance has a role that needs links, and none is good."""
    return state.instance is not None and state.instance.roles.unhealthy


async def health(exchange: Exchange, services: Services, state: MindieState) -> None:
    """GET /health: an error in the same cases."""
    check(services, state)
    if not services.router.ready or _unlinked(state):
        raise MindieError(500, NO_STATUS)
    await exchange.respond(Response(200, b"", b""))


async def model_ready(exchange: Exchange, services: Services, state: MindieState) -> None:
    """GET /v2/models/{model}/ready: answers at once, also for a model whose first worker is starting."""
    check(services, state)
    try:
        target = state.named(exchange.parameters["model"])
    except Unavailable as error:
        raise MindieError(500, NO_STATUS) from error
    if _unlinked(state) or (not target.asleep and not target.responsive):
        raise MindieError(500, NO_STATUS)
    await exchange.respond(Response(200, b"", b""))


async def timed(exchange: Exchange, services: Services, state: MindieState) -> None:
    """GET /health/timed and /health/timed-{N}: generates one token within N seconds."""
    match = TIMED.fullmatch(exchange.parameters.get("wait", ""))
    if match is None:
        raise RouteNotFound("Not Found")
    if state.stopping or services.admission.draining:  # so that a probe does not kill a draining service
        return await exchange.respond(Response(200, HEALTHY))
    if not any(target.clients or target.asleep for target in state.router.targets):
        raise NotHealthy("")
    digits = match[1]
    if digits is not None and len(digits) > 3:
        raise MindieError(404, f"Max wait time is {MAX_WAIT_S}, input is invalid or too long")
    wait_s = DEFAULT_WAIT_S if digits is None else int(digits)
    if not 1 <= wait_s <= MAX_WAIT_S:
        raise MindieError(404, f"Wait time should be in range of [1, {MAX_WAIT_S}], input is not valid")
    try:
        async with asyncio.timeout(wait_s):
            await exchange.unless_gone(_one_token(exchange, services))
    except TimeoutError as error:
        raise MindieError(500, "Engine callback timeout") from error
    except ServingError as error:
        raise MindieError(500, "Failed to get engine response.") from error
    await exchange.respond(Response(200, HEALTHY))


async def _one_token(exchange: Exchange, services: Services) -> None:
    """Generate one token at the highest priority."""
    request = GenerationRequest(
        model=None, prompt=TokenPrompt([1]), sampling=SamplingOverrides(temperature=0.0), max_tokens=1, priority=-100
    )
    generation = await services.generator.prepare(request, exchange, "probe")
    async with aclosing(generation.deltas()) as deltas:
        async for _ in deltas:
            pass
