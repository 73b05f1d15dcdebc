"""What a request may claim of a busy server: whose it is, how important it is, and until when it must begin.

The headers' names are those of the Gateway API inference extension, which gRPC clients send as metadata.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from engine.messages import NOBODY, Tenant
from inference.errors import InvalidRequest

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from management.snapshot import ApiKeyEntry

FAIRNESS_ID = "x-gateway-fairness-id"
OBJECTIVE = "x-gateway-inference-objective"
TIMEOUT = "x-request-timeout"
MAX_CHARACTERS = 128


@dataclass(frozen=True, slots=True)
class Standing:
    """A request's place among others. `deadline` is in monotonic seconds; requests of a greater `band` are served first."""

    tenant: Tenant = NOBODY
    band: int = 0
    deadline: float = math.inf

    def within(self, timeout_s: float) -> float:
        """The seconds from now until the deadline, at most `timeout_s`."""
        return min(timeout_s, self.deadline - time.monotonic())


@dataclass(frozen=True, slots=True)
class Standings:
    """The operator's table of objectives: the band of each name. Requests with another name, or none, are in band 0."""

    objectives: Mapping[str, int] = field(default_factory=dict)

    def of(
        self, key: ApiKeyEntry | None, given: Callable[[str], str | None], remaining_s: float | None = None
    ) -> Standing:
        """The standing of a request. `given` returns a header by its lower-case name; `remaining_s` is the deadline of the
        transport. Raises InvalidRequest with the header's name.
        """
        flow, objective, timeout = (given(name) for name in (FAIRNESS_ID, OBJECTIVE, TIMEOUT))
        if flow is None and objective is None and timeout is None and remaining_s is None and key is None:
            return ANYBODY
        remaining = [] if remaining_s is None else [remaining_s]
        if timeout is not None:
            remaining.append(_seconds(timeout))
        tenant = Tenant("", _name(flow)) if key is None else Tenant(key.prefix, _name(flow), key.limits.weight)
        deadline = time.monotonic() + min(remaining) if remaining else math.inf
        return Standing(tenant, self.objectives.get(objective or "", 0), deadline)


ANYBODY = Standing()


def _name(flow: str | None) -> str:
    if flow is not None and not (0 < len(flow) <= MAX_CHARACTERS and flow.isascii() and flow.isprintable()):
        raise InvalidRequest(f"{FAIRNESS_ID} must have 1 to {MAX_CHARACTERS} printable ASCII characters.", FAIRNESS_ID)
    return flow or ""


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not (seconds > 0 and math.isfinite(seconds)):
        raise InvalidRequest(f"{TIMEOUT} must be a number of seconds above 0.", TIMEOUT)
    return seconds
