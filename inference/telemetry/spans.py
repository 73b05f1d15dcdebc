"""Spans and measurements by OpenTelemetry, of the extra `otel`. Only a server that exports them imports this module.

A trace has a span for the call, below it one for each of its generations, and below that the phases: prepare, queue, prefill,
decode. The engine knows nothing of this: the phases are made when a generation has ended, from the times that came with its
outputs.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.trace import (
    NonRecordingSpan,
    Span,
    SpanContext,
    SpanKind,
    Status,
    StatusCode,
    TraceFlags,
    TraceState,
    set_span_in_context,
)

from inference.generation.ending import EndCause
from inference.generation.generation import Observer
from inference.telemetry import attributes, trace_context
from inference.telemetry.base import Call, Telemetry
from inference.telemetry.trace_context import TraceContext

if TYPE_CHECKING:
    from opentelemetry.context import Context
    from opentelemetry.sdk.metrics import MeterProvider

    from engine.failures import FinishReason
    from inference.generation.generation import Generation
    from inference.telemetry.base import EmbeddingRun

SCOPE = "dragoman"
REQUEST_S = [0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28, 2.56, 5.12, 10.24, 20.48, 40.96, 81.92]
FIRST_TOKEN_S = [0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0]
PER_TOKEN_S = [0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5]
"""Bucket boundaries of the conventions."""
GRPC_FAULTS = frozenset({"UNKNOWN", "DEADLINE_EXCEEDED", "UNIMPLEMENTED", "INTERNAL", "UNAVAILABLE", "DATA_LOSS"})
"""Statuses that are a server's errors, by the conventions."""
CLIENT_LEFT = EndCause.CLIENT_LEFT.value
SHUTDOWN_MS = 5000


class _SpanCall(Call):
    """A call with a span of its own."""

    def __init__(self, span: Span, parent: TraceContext | None) -> None:
        self._span = span
        context = span.get_span_context()
        state = "" if parent is None else parent.state
        self.trace = TraceContext(
            f"{context.trace_id:032x}", f"{context.span_id:016x}", context.trace_flags.sampled, state
        )


class _HttpCall(_SpanCall):
    def end(self, status: int | str) -> None:
        if status:
            self._span.set_attribute("http.response.status_code", status)
        else:
            self._span.set_attribute("error.type", CLIENT_LEFT)
        if int(status) >= 500:
            self._span.set_attribute("error.type", str(status))
            self._span.set_status(Status(StatusCode.ERROR))
        self._span.end()


class _RpcCall(_SpanCall):
    def end(self, status: int | str) -> None:
        name = str(status) if status else "CANCELLED"
        self._span.set_attribute("rpc.response.status_code", name)
        if name != "OK":
            self._span.set_attribute("error.type", name)
        if name in GRPC_FAULTS:
            self._span.set_status(Status(StatusCode.ERROR))
        self._span.end()


class OpenTelemetry(Telemetry, Observer):
    """Makes spans if there is a provider of tracers, and measurements if there is one of meters."""

    def __init__(self, tracers: TracerProvider | None, meters: MeterProvider | None) -> None:
        self._tracers, self._meters = tracers, meters
        self._tracer = None if tracers is None else tracers.get_tracer(SCOPE)
        self._duration = self._first_token = self._per_token = None
        if meters is not None:
            meter = meters.get_meter(SCOPE)
            self._duration, self._first_token, self._per_token = (
                meter.create_histogram(
                    f"gen_ai.server.{name}", "s", description, explicit_bucket_boundaries_advisory=boundaries
                )
                for name, description, boundaries in (
                    ("request.duration", "Time from a request's arrival to its end.", REQUEST_S),
                    ("time_to_first_token", "Time to the first token of successful requests.", FIRST_TOKEN_S),
                    ("time_per_output_token", "Time per later token of successful requests.", PER_TOKEN_S),
                )
            )

    def http(self, method: str, route: str, path: str, request_id: str) -> Call:
        """Start the span of an HTTP call."""
        if self._tracer is None:
            return super().http(method, route, path, request_id)
        parent = trace_context.current()
        known = {
            "http.request.method": method,
            "http.route": route,
            "url.path": path,
            "dragoman.request_id": request_id,
        }
        span = self._tracer.start_span(f"{method} {route}", _context(parent), SpanKind.SERVER, known)
        return _HttpCall(span, parent)

    def rpc(self, method: str, request_id: str) -> Call:
        """Start the span of a gRPC call."""
        if self._tracer is None:
            return super().rpc(method, request_id)
        parent, name = trace_context.current(), method.lstrip("/")
        known = {"rpc.system.name": "grpc", "rpc.method": name, "dragoman.request_id": request_id}
        return _RpcCall(self._tracer.start_span(name, _context(parent), SpanKind.SERVER, known), parent)

    def finished(
        self, generation: Generation, finish: FinishReason, token_times: list[float], preemptions: int
    ) -> None:
        """Make the spans and measurements of a generation that has ended."""
        if self._tracer is not None:
            self._trace(generation)
        if self._duration is None or self._first_token is None or self._per_token is None:
            return
        timings, error = generation.timings, attributes.error_type(generation)
        labels = attributes.metric_attributes(
            attributes.operation(generation), *attributes.model_names(generation), error
        )
        self._duration.record(timings.finished - timings.arrived, labels)
        if error is None and timings.first_token:
            self._first_token.record(timings.first_token - timings.arrived, labels)
            if len(token_times) > 1:
                self._per_token.record((token_times[-1] - token_times[0]) / (len(token_times) - 1), labels)

    def embedded(self, run: EmbeddingRun) -> None:
        """Make the span and the measurement of a request for embeddings that has ended."""
        known = attributes.embedding_attributes(run)
        if self._tracer is not None:
            clock = _Clock()
            span = self._tracer.start_span(
                f"{attributes.EMBEDDINGS} {run.deployment}",
                _context(run.trace),
                attributes=known,
                start_time=clock.ns(run.arrived),
            )
            _end(span, run.error, clock.ns(run.finished))
        if self._duration is not None:
            labels = attributes.metric_attributes(attributes.EMBEDDINGS, run.deployment, run.deployment, run.error)
            self._duration.record(run.finished - run.arrived, labels)

    def close(self) -> None:
        """Export what is left, for at most a few seconds, and end the threads."""
        if self._tracers is not None:
            self._tracers.force_flush(SHUTDOWN_MS)
            self._tracers.shutdown()
        if self._meters is not None:
            self._meters.shutdown(SHUTDOWN_MS)

    def _trace(self, generation: Generation) -> None:
        assert self._tracer is not None
        timings, clock = generation.timings, _Clock()
        name = f"{attributes.operation(generation)} {attributes.model_names(generation)[0]}"
        start = clock.ns(timings.arrived)
        span = self._tracer.start_span(name, _context(generation.trace), start_time=start)
        if span.is_recording():
            span.set_attributes(attributes.generation_attributes(generation))
            inside = set_span_in_context(span)
            for phase, begin, end in _phases(generation):
                part = self._tracer.start_span(phase, inside, start_time=clock.ns(begin))
                part.end(clock.ns(end))
        _end(span, attributes.error_type(generation), clock.ns(timings.finished))


class _Clock:
    """Unix nanoseconds of monotonic seconds, by the clocks' present difference."""

    def __init__(self) -> None:
        self._offset = time.time_ns() - time.monotonic_ns()

    def ns(self, seconds: float) -> int:
        return round(seconds * 1e9) + self._offset


def _phases(generation: Generation) -> list[tuple[str, float, float]]:
    """The phases, each with its begin and end. Without a first token it is unknown when the queue ended."""
    timings = generation.timings
    phases = [("prepare", timings.arrived, timings.submitted)]
    if timings.first_token:
        scheduled = min(timings.submitted + timings.queue_s, timings.first_token)
        phases += [
            ("queue", timings.submitted, scheduled),
            ("prefill", scheduled, timings.first_token),
            ("decode", timings.first_token, timings.last_token),
        ]
    return phases


def _end(span: Span, error: str | None, end_ns: int) -> None:
    if error not in (None, CLIENT_LEFT):  # nothing failed where a client left
        span.set_status(Status(StatusCode.ERROR, error))
    span.end(end_ns)


def _context(trace: TraceContext | None) -> Context | None:
    """A context whose span is the given one, of another process or task; None: a new trace begins."""
    if trace is None:
        return None
    state = TraceState.from_header([trace.state]) if trace.state else None
    flags = TraceFlags(TraceFlags.SAMPLED if trace.sampled else TraceFlags.DEFAULT)
    remote = SpanContext(int(trace.trace_id, 16), int(trace.span_id, 16), True, flags, state)
    return set_span_in_context(NonRecordingSpan(remote))
