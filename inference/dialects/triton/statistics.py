"""Counts and durations of this dialect's inferences per deployment, for Triton's statistics extension."""

from __future__ import annotations

import time
from collections import defaultdict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from inference.dialects.triton.settings import TritonSettings
from inference.generation.generation import Observer

if TYPE_CHECKING:
    from inference.generation.generation import Generation
    from inference.services import Services
    from inference.telemetry.base import EmbeddingRun

NANOSECONDS = 1_000_000_000
KINDS = ("success", "fail", "queue", "compute_input", "compute_infer", "compute_output", "cache_hit", "cache_miss")


@dataclass(slots=True)
class ModelStatistics:
    """The statistics of one deployment."""

    last_inference_ms: int = 0
    inferences: int = 0
    kinds: dict[str, list[int]] = field(default_factory=lambda: {kind: [0, 0] for kind in KINDS})
    """Per kind: the count and the total nanoseconds."""

    def add(self, kind: str, seconds: float) -> None:
        """Add one duration."""
        self.kinds[kind][0] += 1
        self.kinds[kind][1] += int(max(0.0, seconds) * NANOSECONDS)


def statistics_of(services: Services) -> TritonStatistics:
    """The server's TritonStatistics."""
    return next(each for each in services.generator.observers if isinstance(each, TritonStatistics))


def settings_of(services: Services) -> TritonSettings:
    """The dialect's settings, which come with its observer."""
    return statistics_of(services).settings


class TritonStatistics(Observer):
    """An observer of generations and embeddings."""

    def __init__(self, settings: TritonSettings | None = None) -> None:
        self.settings = settings or TritonSettings()
        self._models: dict[str, ModelStatistics] = defaultdict(ModelStatistics)

    def started(self, generation: Generation) -> None:
        """No-op: counted in `finished`."""

    def finished(self, generation: Generation, finish: str, token_times: list[float], preemptions: int) -> None:
        """Record a finished generation; one whose client disconnected counts as failed."""
        if generation.dialect != "triton":
            return
        timings, model = generation.timings, self._models[generation.target.entry.name]
        good = finish in ("stop", "length")
        model.add("success" if good else "fail", timings.finished - timings.arrived)
        if not good:
            return
        model.inferences += 1
        model.last_inference_ms = int(time.time() * 1e3)
        model.add("queue", timings.queue_s)
        model.add("compute_input", timings.submitted - timings.arrived)
        model.add("compute_infer", timings.last_token - timings.submitted - timings.queue_s)
        model.add("compute_output", timings.finished - timings.last_token)
        hit = "cache_hit" if generation.usage.cached_tokens else "cache_miss"
        model.add(hit, 0.0)

    def embedded(self, run: EmbeddingRun) -> None:
        """Record a request for embeddings, of however many texts, as one inference; they have no queue and no cache of their own.
        One that was refused before a worker got it does not count, as of generations.
        """
        if run.dialect != "triton" or not run.submitted:
            return
        model, good = self._models[run.deployment], run.error is None
        model.add("success" if good else "fail", run.finished - run.arrived)
        if not good:
            return
        model.inferences += 1
        model.last_inference_ms = int(time.time() * 1e3)
        model.add("compute_input", run.submitted - run.arrived)
        model.add("compute_infer", run.finished - run.submitted)

    def model(self, deployment: str) -> ModelStatistics:
        """The statistics of a deployment; zeros where nothing was asked of it."""
        return self._models.get(deployment) or ModelStatistics()

    def of(self, deployment: str, name: str, version: str) -> dict[str, Any]:
        """One entry of `model_stats`."""
        model = self.model(deployment)
        kinds = {kind: {"count": count, "ns": ns} for kind, (count, ns) in model.kinds.items()}
        return {
            "name": name,
            "version": version,
            "last_inference": model.last_inference_ms,
            "inference_count": model.inferences,
            "execution_count": model.inferences,
            "inference_stats": kinds,
            "response_stats": {},
            "batch_stats": [],
            "memory_usage": [],
        }
