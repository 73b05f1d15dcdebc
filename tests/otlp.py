"""A collector in the test's own process: takes OTLP over HTTP, and keeps the spans and measurements that come."""

from __future__ import annotations

import threading
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from tests.waiting import wait_until


@dataclass(frozen=True)
class ReceivedSpan:
    name: str
    kind: int
    trace: str
    id: str
    parent: str
    begin: int
    end: int
    failed: bool
    attributes: dict[str, Any]
    resource: dict[str, Any]


@dataclass
class Collector:
    port: int = 0
    spans: list[ReceivedSpan] = field(default_factory=list)
    metrics: dict[str, Any] = field(default_factory=dict)
    """The last export of each metric, by name."""

    @property
    def environment(self) -> dict[str, str]:
        """The variables of a server that exports to this collector, soon."""
        return {
            "OTEL_EXPORTER_OTLP_ENDPOINT": f"http://127.0.0.1:{self.port}",
            "OTEL_BSP_SCHEDULE_DELAY": "100",
            "OTEL_METRIC_EXPORT_INTERVAL": "200",
        }

    def take(self, path: str, body: bytes) -> None:
        if path == "/v1/traces":
            for part in ExportTraceServiceRequest.FromString(body).resource_spans:
                resource = plain(part.resource.attributes)
                self.spans += [received(span, resource) for scope in part.scope_spans for span in scope.spans]
        elif path == "/v1/metrics":
            for part in ExportMetricsServiceRequest.FromString(body).resource_metrics:
                self.metrics |= {metric.name: metric for scope in part.scope_metrics for metric in scope.metrics}

    def trace(self, trace: str, *names: str) -> dict[str, ReceivedSpan]:
        """The spans of a trace by name, once those of these names are there."""
        wait_until(lambda: set(names) <= {s.name for s in self.spans if s.trace == trace}, 60, lambda: self.spans)
        return {span.name: span for span in self.spans if span.trace == trace}

    def points(self, name: str) -> list[Any]:
        """The data points of a histogram."""
        return list(self.metrics[name].histogram.data_points) if name in self.metrics else []


def plain(attributes: Any) -> dict[str, Any]:
    return {each.key: value(each.value) for each in attributes}


def value(any_value: Any) -> Any:
    kind = any_value.WhichOneof("value")
    if kind == "array_value":
        return [value(each) for each in any_value.array_value.values]
    return getattr(any_value, kind)


def received(span: Any, resource: dict[str, Any]) -> ReceivedSpan:
    return ReceivedSpan(
        span.name, span.kind, span.trace_id.hex(), span.span_id.hex(), span.parent_span_id.hex(),
        span.start_time_unix_nano, span.end_time_unix_nano, span.status.code == span.status.STATUS_CODE_ERROR,
        plain(span.attributes), resource,
    )  # fmt: skip


@contextmanager
def collector():
    """A collector that listens until the end of the block."""
    found = Collector()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            found.take(self.path, self.rfile.read(int(self.headers["content-length"])))
            self.send_response(200)
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, format: str, *arguments: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    found.port = server.server_address[1]
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield found
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
