"""TorchServe's metrics of inferences, counted per version of a model."""

from __future__ import annotations

import socket
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, generate_latest

from inference.generation.generation import Observer

if TYPE_CHECKING:
    from collections.abc import Sequence

    from engine.failures import FinishReason
    from inference.generation.generation import Generation

LABELS = ("model_name", "model_version", "hostname")
MICROSECONDS = 1_000_000
NAMES = {
    "ts_inference_requests": "Total number of inference requests.",
    "ts_inference_latency_microseconds": "Total inference latency in Microseconds",
    "ts_queue_latency_microseconds": "Total queue latency in Microseconds",
}


class TorchServeMetrics(Observer):
    """Counts the generations of all dialects."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self._counters = {name: Counter(name, text, LABELS, registry=self._registry) for name, text in NAMES.items()}
        self._hostname = socket.gethostname()

    def finished(
        self, generation: Generation, finish: FinishReason, token_times: list[float], preemptions: int
    ) -> None:
        """Count a generation that has ended."""
        entry, timings = generation.target.entry, generation.timings
        labels = (entry.served_name or entry.name, entry.label, self._hostname)
        values = {
            "ts_inference_requests": 1.0,
            "ts_inference_latency_microseconds": max(0.0, timings.finished - timings.arrived) * MICROSECONDS,
            "ts_queue_latency_microseconds": max(0.0, timings.queue_s) * MICROSECONDS,
        }
        for name, value in values.items():
            self._counters[name].labels(*labels).inc(value)

    def render(self, names: Sequence[str]) -> bytes:
        """The metrics of these names, or all, in the Prometheus text format."""
        if not names:
            return generate_latest(self._registry)
        return generate_latest(self._registry.restricted_registry(list(names)))
