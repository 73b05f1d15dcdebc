"""Who asks for a generation: what a request's transport knows of its client."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol


class Caller(Protocol):
    """An HTTP exchange, or a call of another transport."""

    request_id: str
    tenant: str
    """The public prefix of the API key that was used; empty where none is required."""


@dataclass(slots=True)
class RpcCaller:
    """The client of a remote procedure call."""

    request_id: str
    tenant: str = ""
    connection: str = ""

    @property
    def permit_holder(self) -> str:
        """Whose share of the permits the call counts against: without keys each connection stands for a client."""
        return self.tenant or self.connection
