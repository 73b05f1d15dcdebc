"""What follows calls from outside, and what is told of embeddings. This module does nothing with them; `inference.telemetry.spans` exports them.

Generations and embeddings are followed by an `Observer` (`inference.generation.generation`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from inference.telemetry.trace_context import TraceContext


class Call:
    """A call that nobody follows."""

    trace: TraceContext | None = None
    """The context of the call's own span; None: it has none."""

    def end(self, status: int | str) -> None:
        """The call has ended with this HTTP or gRPC status; 0: without one, because the client left."""


class Telemetry:
    """Follows inference calls. This one follows nothing, and costs a method call for each."""

    def http(self, method: str, route: str, path: str, request_id: str) -> Call:
        """An HTTP call begins, within the task's trace context. `route` is the path with its parameters' names."""
        return UNFOLLOWED

    def rpc(self, method: str, request_id: str) -> Call:
        """A gRPC call of `/package.Service/Method` begins, likewise."""
        return UNFOLLOWED


UNFOLLOWED = Call()


@dataclass(frozen=True, slots=True)
class EmbeddingRun:
    """A request for embeddings that has ended. Times are monotonic seconds, `submitted` is 0 if it was refused before that;
    `error` is its low-cardinality name, None for success.
    """

    trace: TraceContext | None
    request_id: str
    dialect: str
    tenant: str
    deployment: str
    deployment_id: str
    end_user: str
    inputs: int
    prompt_tokens: int
    arrived: float
    submitted: float
    finished: float
    error: str | None
