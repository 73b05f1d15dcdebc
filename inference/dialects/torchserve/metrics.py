"""TorchServe's metrics of inferences, counted per version of a model."""

from __future__ import annotations

import socket
from collections import Counter
from typing import TYPE_CHECKING

from inference.generation.generation import Observer

if TYPE_CHECKING:
    from collections.abc import Sequence

    from engine.failures import FinishReason
    from inference.generation.generation import Generation

MICROSECONDS = 1_000_000
# prometheus_client would add a suffix to two of these names, so they are counted and written here.
NAMES = {
    "ts_inference_requests_total": "Total number of inference requests.",
    "ts_inference_latency_microseconds": "Total inference latency in Microseconds",
    "ts_queue_latency_microseconds": "Total queue latency in Microseconds",
}


class TorchServeMetrics(Observer):
    """Counts the generations of all dialects. Label values come only from the registry."""

    def __init__(self) -> None:
        self._values: dict[str, Counter[tuple[str, str]]] = {name: Counter() for name in NAMES}
        self._hostname = socket.gethostname()

    def finished(
        self, generation: Generation, finish: FinishReason, token_times: list[float], preemptions: int
    ) -> None:
        """Count a generation that has ended."""
        entry, timings = generation.target.entry, generation.timings
        version = (entry.served_name or entry.name, entry.label)
        latency_us = max(0.0, timings.finished - timings.arrived) * MICROSECONDS
        self._values["ts_inference_requests_total"][version] += 1
        self._values["ts_inference_latency_microseconds"][version] += round(latency_us)
        self._values["ts_queue_latency_microseconds"][version] += round(max(0.0, timings.queue_s) * MICROSECONDS)

    def render(self, names: Sequence[str]) -> bytes:
        """The metrics of these names, or all, in the Prometheus text format."""
        lines = []
        for name, text in NAMES.items():
            if names and name not in names:
                continue
            lines += [f"# HELP {name} {text}", f"# TYPE {name} counter"]
            for (model, version), value in self._values[name].items():
                labels = {"model_name": model, "model_version": version, "hostname": self._hostname}
                written = ",".join(f'{label}="{_escaped(given)}"' for label, given in labels.items())
                lines.append(f"{name}{{{written}}} {float(value)}")
        return "".join(f"{line}\n" for line in lines).encode()


def _escaped(value: str) -> str:
    """A label's value in the text format."""
    return value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
