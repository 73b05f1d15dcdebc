"""The headers by which a coordinator tells a prefill instance where a request goes on, checked in MindIE's order and words."""

from __future__ import annotations

import ipaddress
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from inference.dialects.mindie.disaggregation.roles import RoleStatus
from inference.dialects.mindie.errors import MindieError

if TYPE_CHECKING:
    from inference.dialects.mindie.disaggregation.instance import Instance
    from inference.http.exchange import Exchange

MAX_ID = 1024
HEX = re.compile(r"[0-9a-fA-F]+")
UNKNOWN = "The server cannot process the inference request due to an unknown status. "
NOT_HERE = "DMI inference requests can be sent only to the prefill node or p_percentage of the flex node == 0"
MISSING = "DMI request must have req-type, req-id, d-target headers"
NOT_HEX = "Invalid req-id, the character of req-id should be hex char [0-9, a-f, A-F], but got "
TOO_LONG = f"The length of req-id cannot exceed {MAX_ID}"
NO_ADDRESS = "Parameter d-target must be an IPv4 address"
STRANGER = "Parameter d-target must be the address of this instance or of one of its peers"
NO_FLAG = "Parameter is-recompute is an optional parameter. When it is set, it must be true or false."


@dataclass(frozen=True, slots=True)
class Handover:
    """Where a request goes on after its first token."""

    host: str
    port: int


@dataclass(frozen=True, slots=True)
class RoleHeaders:
    """What the coordinator says of a request. `handover` None: this instance is the target; `is_recompute`: the request was begun
    before, and is sent again.
    """

    handover: Handover | None = None
    is_recompute: bool = False


def read_headers(exchange: Exchange, instance: Instance) -> RoleHeaders:
    """Check the headers; raises MindieError."""
    roles = instance.roles
    if roles.status is RoleStatus.UNKNOWN:
        raise MindieError(503, UNKNOWN)
    if not roles.prefills:
        raise MindieError(400, NOT_HERE)
    kind, request_id, target = (exchange.header(name) for name in ("req-type", "req-id", "d-target"))
    if not kind or not request_id or not target:
        raise MindieError(400, MISSING)
    if not HEX.fullmatch(request_id):
        raise MindieError(400, NOT_HEX + request_id[:MAX_ID])
    if len(request_id) > MAX_ID:
        raise MindieError(400, TOO_LONG)
    if kind != "prefill":
        raise MindieError(400, f"Parameter req-type must be prefill but got {kind[:MAX_ID]}")
    found = address_of(target, instance.port)
    if found is None:
        raise MindieError(400, NO_ADDRESS)
    flag = exchange.header("is-recompute")
    if flag not in (None, "true", "false"):
        raise MindieError(400, NO_FLAG)
    again = flag == "true"
    if roles.is_self(*found):
        return RoleHeaders(is_recompute=again)
    if not roles.is_peer(*found):  # nobody else gets prompts and keys
        raise MindieError(400, STRANGER)
    return RoleHeaders(Handover(*found), again)


def address_of(target: str, usual_port: int) -> tuple[str, int] | None:
    """The address in `<IPv4>` or `<IPv4>;<port>`; None for anything else."""
    host, separator, port = target.partition(";")
    try:
        ipaddress.IPv4Address(host)
    except ValueError:
        return None
    if not separator:
        return host, usual_port
    if not (port.isascii() and port.isdigit() and 1 <= len(port) <= 5 and 1 <= int(port) <= 65535):
        return None
    return host, int(port)
