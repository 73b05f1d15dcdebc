"""What Motor's node manager asks of an engine: its status, and the commands of a recovery from faults.

No engine of this server can be paused without losing its requests, so a pause fails, and no other command ever fits the status.
"""

from __future__ import annotations

from enum import IntEnum
from typing import TYPE_CHECKING

from inference.dialects.mindie.answer import body_of
from inference.dialects.mindie.errors import MindieError, invalid
from inference.http.exchange import json_response

if TYPE_CHECKING:
    from inference.dialects.mindie.state import MindieState
    from inference.http.exchange import Exchange
    from inference.services import Services

NO_COMMAND = (
    '{"Error": "cmd_type must be necessary and data type must be integer.",\n            "error_type": "validation"}'
)
NOT_PAUSED = "The engine cannot be paused."


class Status(IntEnum):
    """MindIE's numbers; this server is never ready (0), paused (3) or busy (5)."""

    NORMAL, ABNORMAL, INIT = 1, 2, 4


class Command(IntEnum):
    """MindIE's numbers."""

    PAUSE, REINIT, START, PAUSE_ROCE = 0, 1, 2, 3


async def running_status(exchange: Exchange, services: Services, state: MindieState) -> None:
    """GET /v1/engine-server/running-status: always 200, also while the service stops."""
    await exchange.respond(json_response({"status": _status(services, state), "errors": []}))


async def command(exchange: Exchange, services: Services, state: MindieState) -> None:
    """POST /v1/engine-server/fault-handling-command."""
    body = await body_of(exchange, state, NO_COMMAND)
    given = body.get("cmd")
    if not isinstance(given, int | float):
        raise invalid(NO_COMMAND)
    paused = int(given) in (Command.PAUSE, Command.PAUSE_ROCE)
    if not paused or _status(services, state) is Status.INIT:
        raise MindieError(400, "Command is not consistent with current status.")
    await exchange.respond(json_response({"status": False, "message": NOT_PAUSED, "reason": []}))


def _status(services: Services, state: MindieState) -> Status:
    if services.router.ready:
        return Status.NORMAL
    return Status.ABNORMAL if any(target.clients for target in state.router.targets) else Status.INIT
