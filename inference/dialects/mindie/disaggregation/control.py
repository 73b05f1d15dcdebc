"""The endpoints that set an instance's role, and the one through which a coordinator gets results."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from inference.dialects.mindie.answer import STREAM_HEADERS, body_of
from inference.dialects.mindie.disaggregation.orders import malformed, order_of, order_of_v2
from inference.dialects.mindie.disaggregation.roles import PD_INFO, Role
from inference.dialects.mindie.errors import MindieError, render_late
from inference.http.exchange import Response

if TYPE_CHECKING:
    from collections.abc import Callable

    from inference.dialects.mindie.disaggregation.roles import Order
    from inference.dialects.mindie.state import MindieState
    from inference.http.exchange import Exchange
    from inference.services import Services

OK = b'{"result":"ok"}'
NO_DMI = "Non DMI does not support dresult request"


async def role(exchange: Exchange, services: Services, state: MindieState) -> None:
    """POST /v1/role/{role}."""
    await _take(exchange, state, order_of)


async def role_v2(exchange: Exchange, services: Services, state: MindieState) -> None:
    """POST /v2/role/{role}: version 1 for instances that span several nodes."""
    await _take(exchange, state, order_of_v2)


async def _take(exchange: Exchange, state: MindieState, read: Callable[[Role, dict[str, Any]], Order]) -> None:
    """Take a role, unless this server has none: the order is checked first."""
    try:
        body = await body_of(exchange, state)
    except MindieError as error:
        raise malformed() from error
    order = read(Role(exchange.path.rsplit("/", 1)[1]), body)
    if state.instance is None:
        raise MindieError(503, PD_INFO)
    state.instance.roles.assign(order)
    await exchange.respond(Response(200, OK))


async def results(exchange: Exchange, services: Services, state: MindieState) -> None:
    """GET /dresult: the results of all requests that this instance decodes, without an end; a new reader ends the earlier
    one's stream.
    """
    instance = state.instance
    if instance is None:
        raise MindieError(400, NO_DMI)
    if not instance.roles.decodes:
        raise MindieError(400, f"Only the Decode node supports dresult but you send to {instance.roles.role.value}")

    def ended() -> bool:
        """Whether no more results will come: the server stops, or has another role now."""
        return (services.admission.draining or not instance.roles.decodes) and not instance.decoding

    await exchange.stream(
        instance.results.read(ended),
        headers=STREAM_HEADERS,
        render_error=render_late,
        keep_alive=None,
        errors_before_head=False,
    )
