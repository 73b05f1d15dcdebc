"""GET /metrics of the metrics plane: MindIE's metric names, which have no prefix, for requests through its own
planes.
"""

from __future__ import annotations

import re
from itertools import pairwise
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.registry import Collector

from inference.generation.generation import Observer

if TYPE_CHECKING:
    from collections.abc import Iterator

    from prometheus_client import Metric

    from engine.messages import Stats
    from inference.generation.generation import Generation
    from inference.workers.router import EngineRouter

TTFT_S = (.001, .005, .01, .02, .04, .06, .08, .1, .25, .5, .75, 1, 2.5, 5, 7.5, 10)  # fmt: skip
TPOT_S = (.01, .025, .05, .075, .1, .15, .2, .3, .4, .5, .75, 1, 2.5)  # fmt: skip
E2E_S = (1, 2.5, 5, 10, 15, 20, 30, 40, 50, 60)
TOKENS = (10, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 16000, 20000, 32000, 50000, 64000, 128000)
CREATED = re.compile(r"(?:# (?:HELP|TYPE) )?\w+_created\b")
"""Series that prometheus_client adds but MindIE does not have."""

COUNTERS = {
    "request_received": "Count of received requests.",
    "request_success": "Count of successfully processed requests.",
    "request_failed": "Count of failed requests.",
    "prompt_tokens": "Number of prefill tokens processed.",
    "generation_tokens": "Number of generation tokens processed.",
    "num_preemptions": "Cumulative number of preemption from the engine.",
}
GAUGES = {
    "num_requests_running": "Number of requests currently running on NPU.",
    "num_requests_waiting": "Number of requests waiting to be processed.",
    "num_requests_swapped": "Number of requests swapped to CPU.",
    "avg_prompt_throughput_toks_per_s": "Average prefill throughput in tokens/s.",
    "avg_generation_throughput_toks_per_s": "Average generation throughput in tokens/s.",
    "failed_request_perc": "Requests failure rate. 1 means 100 percent usage.",
    "npu_cache_usage_perc": "NPU KV-cache usage. 1 means 100 percent usage.",
    "cpu_cache_usage_perc": "CPU KV-cache usage. 1 means 100 percent usage.",
    "npu_prefix_cache_hit_rate": "NPU prefix cache block hit rate.",
    "all_radix_match_num": "Total number of prefill prompt tokens participating in prefix cache radix match.",
    "npu_radix_match_hit_num": "Number of prefill prompt tokens hit by prefix cache radix match.",
}
HISTOGRAMS = {
    "time_to_first_token_seconds": ("Histogram of time to first token in seconds.", TTFT_S),
    "time_per_output_token_seconds": ("Histogram of time per output token in seconds.", TPOT_S),
    "e2e_request_latency_seconds": ("Histogram of end to end request latency in seconds.", E2E_S),
    "request_prompt_tokens": ("Number of prefill tokens processed.", TOKENS),
    "request_generation_tokens": ("Number of generation tokens processed.", TOKENS),
}


class _Labelled(Collector):
    """A registry's series with further labels."""

    def __init__(self, registry: CollectorRegistry, labels: dict[str, str]) -> None:
        self._registry, self._labels = registry, labels

    def collect(self) -> Iterator[Metric]:
        for metric in self._registry.collect():
            metric.samples = [each._replace(labels={**each.labels, **self._labels}) for each in metric.samples]
            yield metric


class MindieMetrics(Observer):
    """An observer of generations that renders the metrics page.

    All series have the label `model_name`; several names are joined by " & ". It is put to the page only, so that the numbers
    go on and there is one series of each kind as deployments come and go.
    """

    def __init__(self, router: EngineRouter) -> None:
        self._router, self._registry = router, CollectorRegistry()
        self._received = self._failed = 0
        self._counters = {n: Counter(n, text, registry=self._registry) for n, text in COUNTERS.items()}
        self._gauges = {n: Gauge(n, text, registry=self._registry) for n, text in GAUGES.items()}
        self._histograms = {
            name: Histogram(name, text, buckets=buckets, registry=self._registry)
            for name, (text, buckets) in HISTOGRAMS.items()
        }

    @property
    def _model_name(self) -> str:
        return " & ".join(target.entry.name for target in self._router.targets)

    def received(self) -> None:
        """Count a received request."""
        self._received += 1
        self._counters["request_received"].inc()

    def failed(self) -> None:
        """Count a failed request."""
        self._failed += 1
        self._counters["request_failed"].inc()

    def started(self, generation: Generation) -> None:
        """Count a request sent to an engine."""

    def finished(self, generation: Generation, finish: str, token_times: list[float], preemptions: int) -> None:
        """Record a finished generation of MindIE's dialects."""
        if generation.dialect != "mindie" or not token_times:
            return
        timings = generation.timings
        self._counters["prompt_tokens"].inc(generation.usage.prompt_tokens)
        self._counters["generation_tokens"].inc(generation.usage.completion_tokens)
        self._counters["num_preemptions"].inc(preemptions)
        observed = {
            "time_to_first_token_seconds": token_times[0] - timings.submitted,
            "request_prompt_tokens": generation.usage.prompt_tokens,
            "request_generation_tokens": generation.usage.completion_tokens,
        }
        if finish in ("stop", "length"):
            self._counters["request_success"].inc()
            observed["e2e_request_latency_seconds"] = timings.finished - timings.arrived
        for histogram, value in observed.items():
            self._histograms[histogram].observe(value)
        between = self._histograms["time_per_output_token_seconds"]
        for earlier, later in pairwise(token_times):
            between.observe(later - earlier)

    def render(self) -> bytes:
        """The page in the Prometheus text format."""
        stats = [client.stats for target in self._router.targets for client in target.clients.values()]
        for gauge, value in self._gauge_values(stats).items():
            self._gauges[gauge].set(value)
        page = CollectorRegistry()
        page.register(_Labelled(self._registry, {"model_name": self._model_name}))
        lines = generate_latest(page).decode().splitlines(keepends=True)
        return "".join(line for line in lines if not CREATED.match(line)).encode()

    def _gauge_values(self, stats: list[Stats]) -> dict[str, float]:
        total, used = sum(s.blocks_total for s in stats), sum(s.blocks_used for s in stats)
        queries, hits = sum(s.prefix_queries for s in stats), sum(s.prefix_hits for s in stats)
        prefill_s, decode_s = sum(s.prefill_s for s in stats), sum(s.decode_s for s in stats)
        prompt, generated = sum(s.prompt_tokens for s in stats), sum(s.generation_tokens for s in stats)
        return {
            "num_requests_running": sum(s.running for s in stats),
            "num_requests_waiting": sum(s.waiting for s in stats),
            "num_requests_swapped": 0,
            "avg_prompt_throughput_toks_per_s": prompt / prefill_s if prefill_s else 0.0,
            "avg_generation_throughput_toks_per_s": generated / decode_s if decode_s else 0.0,
            "failed_request_perc": self._failed / self._received if self._received else 0.0,
            "npu_cache_usage_perc": used / total if total else 0.0,
            "cpu_cache_usage_perc": 0.0,
            "npu_prefix_cache_hit_rate": hits / queries if queries else 0.0,
            "all_radix_match_num": queries,
            "npu_radix_match_hit_num": hits,
        }
