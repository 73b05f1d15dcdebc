"""Triton's metrics plane: its own counters of inferences, then the metrics of the front plane, those of vLLM among them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from inference.dialects.triton.errors import STATUSES, render
from inference.dialects.triton.statistics import statistics_of
from inference.http.exchange import Response
from inference.http.routing import Route, RouteSet

if TYPE_CHECKING:
    from inference.http.exchange import Exchange
    from inference.services import Services

MICROSECOND_NS = 1_000
TEXT = b"text/plain; charset=utf-8"
# prometheus_client would add a suffix to these names, so they are written here.
COUNTS = {
    "nv_inference_request_success": ("Number of successful inference requests, all batch sizes", "success"),
    "nv_inference_request_failure": ("Number of failed inference requests, all batch sizes", "fail"),
    "nv_inference_count": ("Number of inferences performed", "success"),
    "nv_inference_exec_count": ("Number of model executions performed", "success"),
}
DURATIONS = {
    "nv_inference_request_duration_us": ("Cumulative inference request duration in microseconds", "success"),
    "nv_inference_queue_duration_us": ("Cumulative inference queuing duration in microseconds", "queue"),
    "nv_inference_compute_input_duration_us": ("Cumulative compute input duration in microseconds", "compute_input"),
    "nv_inference_compute_infer_duration_us": (
        "Cumulative compute inference duration in microseconds",
        "compute_infer",
    ),
    "nv_inference_compute_output_duration_us": ("Cumulative compute output duration in microseconds", "compute_output"),
}
"""The text and the kind of statistics."""
FAILURE = "nv_inference_request_failure"


async def metrics(exchange: Exchange, services: Services) -> None:
    """GET /metrics: of every deployment that is served now."""
    await exchange.respond(Response(200, own(services) + services.metrics.render(), TEXT))


def own(services: Services) -> bytes:
    """Triton's counters in the Prometheus text format."""
    entries = [target.entry for target in services.router.targets]
    lines = []
    for name, (text, kind) in {**COUNTS, **DURATIONS}.items():
        lines += [f"# HELP {name} {text}", f"# TYPE {name} counter"]
        for entry in entries:
            count, total_ns = statistics_of(services).model(entry.name).kinds[kind]
            reason = 'reason="OTHER",' if name == FAILURE else ""
            labels = f'model="{entry.name}",{reason}version="{entry.version}"'
            lines.append(f"{name}{{{labels}}} {count if name in COUNTS else total_ns // MICROSECOND_NS}")
    return "".join(f"{line}\n" for line in lines).encode()


ROUTES = RouteSet(
    (Route("GET", "/metrics", metrics, render, "List the metrics in the Prometheus format", scope="metrics"),),
    render,
    STATUSES,
)
