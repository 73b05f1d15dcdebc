"""The caller of a generation, as its transport identifies it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from inference.admission.standing import ANYBODY

if TYPE_CHECKING:
    from inference.admission.standing import Standing


class Caller(Protocol):
    """An HTTP exchange, or a call of another transport."""

    request_id: str
    tenant: str
    """The public prefix of the API key; "" if no key is required."""
    standing: Standing


@dataclass(slots=True)
class RpcCaller:
    """The caller of a request that is not an HTTP exchange (gRPC)."""

    request_id: str
    tenant: str = ""
    connection: str = ""
    standing: Standing = ANYBODY

    @property
    def permit_holder(self) -> str:
        """The tenant for permits: the API key, else the flow that the client names, else the connection."""
        return self.tenant or self.standing.tenant.flow or self.connection
