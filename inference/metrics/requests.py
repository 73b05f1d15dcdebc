"""Request metrics of the front plane in vLLM's (`vllm:*`) and TGI's (`tgi_*`) names.

Counters are updated when a request ends; engine gauges are read from the last heartbeats at scrape time. Label values
come only from the registry, so a client cannot create series.
"""

from __future__ import annotations

import asyncio
from itertools import pairwise
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from inference.generation.generation import Observer
from inference.generation.placement import ReplayCause
from inference.metrics.engine import LABELS, BatchCollector, EngineCollector, histograms_of
from inference.metrics.offload import OffloadCollector

if TYPE_CHECKING:
    from collections.abc import Callable

    from inference.errors import ServingError
    from inference.generation.generation import Generation
    from inference.workers.router import EngineRouter

TTFT_S = (.001, .005, .01, .02, .04, .06, .08, .1, .25, .5, .75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640, 2560)  # fmt: skip
ITL_S = (.01, .025, .05, .075, .1, .15, .2, .3, .4, .5, .75, 1, 2.5, 5, 7.5, 10, 20, 40, 80)  # fmt: skip
LATENCY_S = (.3, .5, .8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680)  # fmt: skip
TOKENS = tuple(m * 10**e for e in range(6) for m in (1, 2, 5))
TGI_DURATION_S = tuple(0.0001 * 1.5**k for k in range(1, 36))
VLLM_TOKEN_HISTOGRAMS = ("request_prompt_tokens", "request_generation_tokens", "request_params_max_tokens",
                         "request_max_num_generation_tokens", "request_prefill_kv_computed_tokens")  # fmt: skip
VLLM_LATENCY_HISTOGRAMS = ("e2e_request_latency_seconds", "request_queue_time_seconds",
                           "request_inference_time_seconds", "request_prefill_time_seconds",
                           "request_decode_time_seconds")  # fmt: skip
TGI_DURATIONS = ("duration", "validation_duration", "queue_duration", "inference_duration",
                 "mean_time_per_token_duration")  # fmt: skip
REASONS = (
    "overloaded", "draining", "deadline", "share", "rate", "quota", "duplicate", "quarantine", "unavailable", "key", "size",
)  # fmt: skip
"""Of refusals; a client cannot make others."""
QUEUED = "max_num_queued_reqs"
"""vLLM's reason of a refusal for the number of requests."""
TGI_COUNTS = ("generated_tokens", "input_length", "max_new_tokens")


class Metrics(Observer):
    """Counts requests of all dialects and renders the metrics page."""

    def __init__(
        self,
        router: EngineRouter,
        dropped_log_lines: Callable[[], int],
        registry_reachable: Callable[[], bool],
        redis_reachable: Callable[[], bool] | None = None,
    ) -> None:
        """`dropped_log_lines` returns the number of log lines dropped because the reader was too slow; `registry_reachable`
        whether the database could be used when it was last tried, and `redis_reachable` the same of Redis, if it is used.
        """
        self._redis_reachable = redis_reachable
        self._dropped_log_lines = dropped_log_lines
        self._registry_reachable = registry_reachable
        self._vllm_registry, self._tgi_registry = CollectorRegistry(), CollectorRegistry()
        self._vllm_registry.register(EngineCollector(router))
        self._vllm_registry.register(OffloadCollector(router))
        self._tgi_registry.register(BatchCollector(router))
        self._router = router
        self._vllm = {
            **{n: self._histogram(n, TOKENS) for n in VLLM_TOKEN_HISTOGRAMS},
            **{n: self._histogram(n, LATENCY_S) for n in VLLM_LATENCY_HISTOGRAMS},
            "time_to_first_token_seconds": self._histogram("time_to_first_token_seconds", TTFT_S),
            "inter_token_latency_seconds": self._histogram("inter_token_latency_seconds", ITL_S),
            "request_time_per_output_token_seconds": self._histogram("request_time_per_output_token_seconds", ITL_S),
            "request_params_n": self._histogram("request_params_n", (1, 2, 5, 10, 20)),
            "request_num_preemptions": self._histogram("request_num_preemptions", (1, 2, 3, 4, 5, 10, 20)),
        }
        self._cached = Counter(
            "vllm:prompt_tokens_cached", "Prompt tokens from the prefix cache.", LABELS, registry=self._vllm_registry
        )
        self._success = Counter(
            "vllm:request_success",
            "Count of processed requests.",
            [*LABELS, "finished_reason"],
            registry=self._vllm_registry,
        )
        self._rejections = Counter(
            "vllm:admission_rejections",
            "Requests that were refused because too many are queued; without a name: before their model was known.",
            ["model_name", "reason"],
            registry=self._vllm_registry,
        )
        self._rejections.labels("", QUEUED)
        self._replays = Counter(
            "dragoman_replays",
            "Sequences that went on at another worker, by cause.",
            ["cause"],
            registry=self._vllm_registry,
        )
        for cause in ReplayCause:
            self._replays.labels(cause)
        self._refusals = Counter(
            "dragoman_refusals", "Requests that were refused, by reason.", ["reason"], registry=self._vllm_registry
        )
        for reason in REASONS:
            self._refusals.labels(reason)
        self._idempotent = Counter(
            "dragoman_idempotent_replays",
            "Responses that were sent again under an Idempotency-Key.",
            registry=self._vllm_registry,
        )
        self._tgi = {
            **{n: self._tgi_histogram(n, TGI_DURATION_S) for n in TGI_DURATIONS},
            **{n: self._tgi_histogram(n, TOKENS) for n in TGI_COUNTS},
        }
        self._tgi_gauges = {
            name: Gauge(f"tgi_{name}", text, registry=self._tgi_registry)
            for name, text in {
                "queue_size": "Current queue size",
                "batch_current_size": "Current batch size",
                "batch_current_max_tokens": "Maximum tokens for the current batch",
            }.items()
        }
        # TGI's counters have no `_total` suffix, which prometheus_client would add; so they are counted and rendered
        # here.
        self._tgi_counters: dict[str, dict[str, int]] = {
            "tgi_request_count": {"": 0},
            "tgi_request_success": {"": 0},
            "tgi_request_failure": {},
        }

    def started(self, generation: Generation) -> None:
        """Count a request sent to an engine."""
        self._tgi_counters["tgi_request_count"][""] += 1

    def rejected(self, deployment: str = "") -> None:
        """Count a request that was refused because too many are queued."""
        self._rejections.labels(deployment, QUEUED).inc()

    def answered(self, error: ServingError) -> None:
        """Count a request that was answered with this error, if it was refused."""
        if error.reason:
            self._refusals.labels(error.reason).inc()

    def replayed(self) -> None:
        """Count a response that was sent again."""
        self._idempotent.inc()

    def refused(self, reason: str) -> None:
        """Count a request refused before it reached an engine; `reason` is TGI's `err` label."""
        self._count_failure(reason)

    def finished(self, generation: Generation, finish: str, token_times: list[float], preemptions: int) -> None:
        """Count a finished request: "stop", "length", "error", or "abort" when the client disconnected."""
        labels = (generation.target.entry.name, "0")
        self._success.labels(*labels, finish).inc()
        for cause, count in generation.replays.items():
            self._replays.labels(cause).inc(count)
        timings, usage = generation.timings, generation.usage
        if finish not in ("stop", "length"):
            self._count_failure("dropped" if finish == "abort" else "generation")
            if not token_times:
                return
        total = timings.finished - timings.arrived
        inference = max(0.0, timings.last_token - timings.submitted - timings.queue_s)
        first = max(0.0, timings.first_token - timings.submitted - timings.queue_s)
        values = {
            "request_prompt_tokens": usage.prompt_tokens,
            "request_generation_tokens": usage.completion_tokens,
            "request_params_max_tokens": generation.params.max_tokens,
            "request_max_num_generation_tokens": max(generation.sequence_tokens),
            "request_prefill_kv_computed_tokens": usage.prompt_tokens - usage.cached_tokens,
            "e2e_request_latency_seconds": total,
            "request_queue_time_seconds": timings.queue_s,
            "request_inference_time_seconds": inference,
            "request_prefill_time_seconds": first,
            "request_decode_time_seconds": max(0.0, timings.last_token - timings.first_token),
            "time_to_first_token_seconds": timings.first_token - timings.arrived,
            "request_params_n": generation.request.n,
            "request_num_preemptions": preemptions,
        }
        if len(token_times) > 1:
            values["request_time_per_output_token_seconds"] = (token_times[-1] - token_times[0]) / (
                len(token_times) - 1
            )
        for name, value in values.items():
            self._vllm[name].labels(*labels).observe(value)
        self._cached.labels(*labels).inc(usage.cached_tokens)
        gaps = self._vllm["inter_token_latency_seconds"].labels(*labels)
        for earlier, later in pairwise(token_times):
            gaps.observe(later - earlier)
        if finish in ("stop", "length"):
            self._tgi_counters["tgi_request_success"][""] += 1
        tgi = {
            "duration": total,
            "validation_duration": timings.submitted - timings.arrived,
            "queue_duration": timings.queue_s,
            "inference_duration": inference,
            "mean_time_per_token_duration": inference / max(1, usage.completion_tokens),
            "generated_tokens": usage.completion_tokens,
            "input_length": usage.prompt_tokens,
            "max_new_tokens": generation.params.max_tokens,
        }
        for name, value in tgi.items():
            self._tgi[name].observe(value)

    def render(self) -> bytes:
        """The vLLM and TGI metrics in the Prometheus text format. Called on the event loop, whose tasks it counts."""
        stats = [c.stats for target in self._router.targets for c in target.clients.values()]
        self._tgi_gauges["queue_size"].set(sum(s.waiting for s in stats))
        self._tgi_gauges["batch_current_size"].set(sum(s.running for s in stats))
        block = {target.info.block_size for target in self._router.targets}
        self._tgi_gauges["batch_current_max_tokens"].set(sum(s.blocks_used for s in stats) * max(block, default=0))
        lines = []
        counters = {
            **self._tgi_counters,
            "tgi_batch_inference_count": {
                'method="prefill"': sum(s.prefill_steps for s in stats),
                'method="decode"': sum(s.decode_steps for s in stats),
            },
        }
        counters["tgi_batch_inference_success"] = counters["tgi_batch_inference_count"]
        failed = sum(h.failed for target in self._router.targets for h in histograms_of(target))
        joined = sum(h.mixed for target in self._router.targets for h in histograms_of(target))
        counters["tgi_batch_concat"] = {'reason="chunking"': joined}
        counters["tgi_batch_inference_failure"] = {'method="decode"': failed} if failed else {}
        for name, series in counters.items():
            lines.append(f"# TYPE {name} counter")
            lines += [
                f"{name}{{{labels}}} {value}" if labels else f"{name} {value}" for labels, value in series.items()
            ]
        lines += [
            "# HELP dragoman_log_lines_dropped_total Log lines thrown away because nobody read the log.",
            "# TYPE dragoman_log_lines_dropped_total counter",
            f"dragoman_log_lines_dropped_total {self._dropped_log_lines()}",
            "# HELP dragoman_event_loop_tasks Tasks of this process's event loop.",
            "# TYPE dragoman_event_loop_tasks gauge",
            f"dragoman_event_loop_tasks {len(asyncio.all_tasks())}",
            "# HELP dragoman_registry_reachable Whether the database could be used when it was last tried.",
            "# TYPE dragoman_registry_reachable gauge",
            f"dragoman_registry_reachable {int(self._registry_reachable())}",
        ]
        if self._redis_reachable is not None:
            lines += [
                "# HELP dragoman_redis_reachable Whether Redis answered when it was last asked.",
                "# TYPE dragoman_redis_reachable gauge",
                f"dragoman_redis_reachable {int(self._redis_reachable())}",
            ]
        own = "\n".join(lines).encode() + b"\n"
        return generate_latest(self._vllm_registry) + generate_latest(self._tgi_registry) + own

    def _count_failure(self, reason: str) -> None:
        failures = self._tgi_counters["tgi_request_failure"]
        label = f'err="{reason}"'
        failures[label] = failures.get(label, 0) + 1

    def _histogram(self, name: str, buckets: tuple[float, ...]) -> Histogram:
        text = name.replace("_", " ").capitalize() + "."
        return Histogram(f"vllm:{name}", text, LABELS, buckets=buckets, registry=self._vllm_registry)

    def _tgi_histogram(self, name: str, buckets: tuple[float, ...]) -> Histogram:
        text = "Request " + name.replace("_", " ")
        return Histogram(f"tgi_request_{name}", text, buckets=buckets, registry=self._tgi_registry)
