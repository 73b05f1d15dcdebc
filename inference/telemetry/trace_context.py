"""W3C's trace context (https://www.w3.org/TR/trace-context/): the trace that a call belongs to, for its log lines and spans.

It belongs to the task that handles the call, so that nothing between the route and the log has to pass it on.
"""

from __future__ import annotations

import re
from contextvars import ContextVar
from dataclasses import dataclass

import structlog

MAX_STATE_CHARACTERS = 512
_TRACEPARENT = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")
_STATE = re.compile(r"[\x20-\x7e]*")
SAMPLED = 1


@dataclass(frozen=True, slots=True)
class TraceContext:
    """A span and its trace, as hexadecimal ids. `sampled`: whether its caller records the trace. `state` is the caller's own,
    passed on unread.
    """

    trace_id: str
    span_id: str
    sampled: bool = True
    state: str = ""

    @property
    def header(self) -> str:
        """The text of a `traceparent` or `traceresponse` header."""
        return f"00-{self.trace_id}-{self.span_id}-{int(self.sampled):02x}"


def parse(traceparent: str | None, tracestate: str | None = None) -> TraceContext | None:
    """The context of the headers of a call; None without a valid `traceparent`, as the standard demands."""
    found = None if traceparent is None else _TRACEPARENT.fullmatch(traceparent.strip())
    if found is None:
        return None
    version, trace_id, span_id, flags, rest = found.groups()
    if version == "ff" or (version == "00" and rest) or not int(trace_id, 16) or not int(span_id, 16):
        return None
    state = tracestate or ""
    if len(state) > MAX_STATE_CHARACTERS or not _STATE.fullmatch(state):
        state = ""
    return TraceContext(trace_id, span_id, bool(int(flags, 16) & SAMPLED), state)


_current: ContextVar[TraceContext | None] = ContextVar("trace", default=None)


def current() -> TraceContext | None:
    """The trace context of the call that this task handles; None if it has none."""
    return _current.get()


def enter(trace: TraceContext | None) -> None:
    """Make this the trace context of the task, also in its log lines."""
    _current.set(trace)
    if trace is not None:
        structlog.contextvars.bind_contextvars(trace_id=trace.trace_id)
