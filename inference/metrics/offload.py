"""Metrics of the KV offload, from the workers' last reports. Names of our own: they tell what vLLM's do not."""

from __future__ import annotations

from typing import TYPE_CHECKING

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

if TYPE_CHECKING:
    from collections.abc import Iterator

    from prometheus_client.metrics_core import Metric

    from engine.offload.stats import OffloadStats, TierStats
    from inference.workers.router import EngineRouter

LABELS = ("model_name", "engine")
COUNTERS = {
    "hits": "KV blocks that came back from a tier.",
    "stored": "KV blocks that were written to a tier.",
    "evictions": "KV blocks that a tier removed to make room.",
}
LOSSES = ("damaged", "dropped", "failures", "late")


class OffloadCollector:
    """Tiers of the deployments that have any."""

    def __init__(self, router: EngineRouter) -> None:
        self._router = router

    def collect(self) -> Iterator[Metric]:
        """Called by prometheus_client on every scrape."""
        rows = [(t.entry.name, [c.stats.offload for c in t.clients.values()]) for t in self._router.targets]
        found = [(name, [s for s in stats if s is not None]) for name, stats in rows]
        held = GaugeMetricFamily("dragoman_kv_offload_bytes", "Bytes that a tier holds.", labels=[*LABELS, "tier"])
        families = {
            name: CounterMetricFamily(f"dragoman_kv_offload_{name}", text, labels=[*LABELS, "tier"])
            for name, text in COUNTERS.items()
        }
        text = "What the KV offload lost, each of which was computed instead, by why."
        lost = CounterMetricFamily("dragoman_kv_offload_lost", text, labels=[*LABELS, "reason"])
        for name, stats in found:
            for tier, tiers in _tiers(stats).items():
                sizes = [each.bytes for each in tiers]
                held.add_metric([name, "0", tier], max(sizes) if tier == "disk" else sum(sizes))  # one folder for all
                for counter, family in families.items():
                    family.add_metric([name, "0", tier], sum(getattr(each, counter) for each in tiers))
            for reason in LOSSES if stats else ():
                lost.add_metric([name, "0", reason], sum(getattr(each, reason) for each in stats))
        yield held
        yield from families.values()
        yield lost


def _tiers(stats: list[OffloadStats]) -> dict[str, list[TierStats]]:
    """The workers' tiers by name, without those that no worker has."""
    tiers = {"memory": [s.memory for s in stats], "disk": [s.disk for s in stats]}
    found = {name: [tier for tier in each if tier is not None] for name, each in tiers.items()}
    return {name: each for name, each in found.items() if each}
