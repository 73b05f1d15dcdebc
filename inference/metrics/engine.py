"""Engine gauges, counters and histograms in vLLM's and TGI's names, read from the workers' last heartbeats at scrape
time.
"""

from __future__ import annotations

import time
from itertools import accumulate
from typing import TYPE_CHECKING, get_args

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily

from engine.kv_transfer.handle import TransferCode
from engine.messages import DRAFTED, STEP_REQUESTS, STEP_S, STEP_TOKENS, StepHistograms
from inference.workers.routing.balancer import EjectionReason

if TYPE_CHECKING:
    from collections.abc import Iterator

    from prometheus_client.metrics_core import Metric

    from engine.messages import Stats
    from inference.workers.router import EngineRouter
    from inference.workers.target import Target

LABELS = ("model_name", "engine")
METHODS = ("prefill", "decode")


class EngineCollector:
    """vLLM's metrics, summed over a deployment's workers, and the router's."""

    GAUGES = {"num_requests_running": "running", "num_requests_waiting": "waiting"}
    COUNTERS = {
        "prompt_tokens": "prompt_tokens",
        "generation_tokens": "generation_tokens",
        "prefix_cache_queries": "prefix_queries",
        "prefix_cache_hits": "prefix_hits",
        "num_preemptions": "preemptions",
    }

    def __init__(self, router: EngineRouter) -> None:
        self._router = router

    def collect(self) -> Iterator[Metric]:
        """Called by prometheus_client on every scrape."""
        rows = [(t, [c.stats for c in t.clients.values()]) for t in self._router.targets]
        for kind, names in ((GaugeMetricFamily, self.GAUGES), (CounterMetricFamily, self.COUNTERS)):
            for name, attribute in names.items():
                family = kind(f"vllm:{name}", name.replace("_", " ").capitalize() + ".", labels=LABELS)
                for target, stats in rows:
                    family.add_metric([target.entry.name, "0"], sum(getattr(s, attribute) for s in stats))
                yield family
        usage = GaugeMetricFamily("vllm:kv_cache_usage_perc", "KV-cache usage. 1 means 100 percent.", labels=LABELS)
        info_labels = [*LABELS, "block_size", "num_gpu_blocks", "kv_cache_size_tokens", "kv_cache_max_concurrency"]
        info = GaugeMetricFamily("vllm:cache_config_info", "Information of the KV cache.", labels=info_labels)
        for target, stats in rows:
            total = sum(s.blocks_total for s in stats)
            usage.add_metric([target.entry.name, "0"], sum(s.blocks_used for s in stats) / total if total else 0.0)
            tokens = target.info.num_blocks * target.info.block_size
            concurrency = f"{tokens / target.info.max_model_len:.2f}"
            labels = [str(target.info.block_size), str(target.info.num_blocks), str(tokens), concurrency]
            info.add_metric([target.entry.name, "0", *labels], 1)
        yield usage
        yield info
        yield self._steps(rows)
        yield self._waiting(rows)
        yield self._awake(rows)
        yield self._adapters(rows)
        yield self._ejections(rows)
        yield self._held(rows)
        yield from self._transfers(rows)

    def _steps(self, rows: list[tuple[Target, list[Stats]]]) -> Metric:
        """The histogram `iteration_tokens_total` of vLLM."""
        family = HistogramMetricFamily("vllm:iteration_tokens_total", "Tokens per engine step.", labels=LABELS)
        for target, _ in rows:
            histograms = histograms_of(target)
            counts = _summed([h.tokens for h in histograms], len(STEP_TOKENS) + 1)
            total = sum(h.tokens_sum for h in histograms)
            family.add_metric([target.entry.name, "0"], _buckets(STEP_TOKENS, counts), total)
        return family

    def _waiting(self, rows: list[tuple[Target, list[Stats]]]) -> Metric:
        text = "Requests that wait, by what for."
        family = GaugeMetricFamily("vllm:num_requests_waiting_by_reason", text, labels=[*LABELS, "reason"])
        for target, stats in rows:
            family.add_metric([target.entry.name, "0", "capacity"], sum(s.waiting for s in stats))
            family.add_metric([target.entry.name, "0", "deferred"], 0)
        return family

    def _awake(self, rows: list[tuple[Target, list[Stats]]]) -> Metric:
        family = GaugeMetricFamily(
            "vllm:engine_sleep_state", "1 where the engine is so.", labels=[*LABELS, "sleep_state"]
        )
        for target, _ in rows:
            for state in ("awake", "weights_offloaded", "discard_all"):
                family.add_metric([target.entry.name, "0", state], float(state == "awake"))
        return family

    def _adapters(self, rows: list[tuple[Target, list[Stats]]]) -> Metric:
        """vllm:lora_requests_info: adapters in slots; the value is the scrape time."""
        labels = ["max_lora", "waiting_lora_adapters", "running_lora_adapters"]
        family = GaugeMetricFamily("vllm:lora_requests_info", "Adapters in slots.", labels=labels)
        in_slots = {digest for _, stats in rows for s in stats for digest in s.adapters}
        names = [a.name for target, _ in rows for a in target.entry.adapters if a.digest in in_slots]
        family.add_metric([str(len(in_slots)), "", ",".join(names)], time.time())
        return family

    def _ejections(self, rows: list[tuple[Target, list[Stats]]]) -> Metric:
        """A metric of our own: vLLM has no router."""
        text = "Times that a worker got no requests for a while, by why."
        family = CounterMetricFamily("dragoman_worker_ejections", text, labels=[*LABELS, "reason"])
        for target, _ in rows:
            for reason in get_args(EjectionReason):
                family.add_metric([target.entry.name, "0", reason], target.balancer.ejections[reason])
        return family

    def _held(self, rows: list[tuple[Target, list[Stats]]]) -> Metric:
        text = "Requests that wait for a worker of a deployment without a ready one."
        family = GaugeMetricFamily("dragoman_held_requests", text, labels=LABELS)
        # Those that have never had a worker are no targets.
        entries = {entry.public_id: entry.name for entry in (*self._router.deployments, *(t.entry for t, _ in rows))}
        for public_id, name in entries.items():
            family.add_metric([name, "0"], self._router.holding.count(public_id))
        return family

    def _transfers(self, rows: list[tuple[Target, list[Stats]]]) -> Iterator[Metric]:
        """Of deployments whose workers have moved blocks."""
        held = GaugeMetricFamily("dragoman_kv_blocks_held", "KV blocks held for other workers.", labels=LABELS)
        fetched = CounterMetricFamily("dragoman_kv_blocks_fetched", "KV blocks from other workers.", labels=LABELS)
        text = "Transfers of KV blocks that failed, by why; their prompts were computed again."
        failed = CounterMetricFamily("dragoman_kv_transfer_failures", text, labels=[*LABELS, "reason"])
        for target, stats in rows:
            moved = [each.kv for each in stats if each.kv is not None]
            if not moved:
                continue
            held.add_metric([target.entry.name, "0"], sum(each.held_blocks for each in moved))
            fetched.add_metric([target.entry.name, "0"], sum(each.fetched_blocks for each in moved))
            for code in TransferCode:
                count = sum(each.failures.get(code, 0) for each in moved)
                failed.add_metric([target.entry.name, "0", code.value], count)
        yield from (held, fetched, failed)


class BatchCollector:
    """TGI's batch metrics; steps with prompt tokens count as prefill, all others as decode.

    A step's time is TGI's inference and its forward pass. What TGI calls decoding a batch (choosing tokens, turning them into
    text) is in the step here or in this process, and batches are never concatenated: both are counted and take no time.
    """

    def __init__(self, router: EngineRouter) -> None:
        self._router = router

    def collect(self) -> Iterator[Metric]:
        """Called by prometheus_client on every scrape."""
        stats = [c.stats for t in self._router.targets for c in t.clients.values()]
        found = [h for target in self._router.targets for h in histograms_of(target)]
        steps = {
            method: (
                _summed([getattr(h, f"{method}_s") for h in found], len(STEP_S) + 1),
                sum(getattr(s, f"{method}_s") for s in stats),
            )
            for method in METHODS
        }
        published = {
            method: (
                _summed([getattr(h, f"publish_{method}_s") for h in found], len(STEP_S) + 1),
                sum(getattr(h, f"publish_{method}_sum_s") for h in found),
            )
            for method in METHODS
        }
        untimed = {method: ([sum(counts), *[0] * len(STEP_S)], 0.0) for method, (counts, _) in steps.items()}
        joined = {"decode": ([sum(h.mixed for h in found), *[0] * len(STEP_S)], 0.0)}
        for name, text, series in (
            ("inference", "Batch inference duration", steps),
            ("forward", "Batch forward duration per method (prefill or decode)", steps),
            ("decode", "Time spent decoding a batch per method (prefill or decode)", untimed),
            (
                "filter",
                "Time spent filtering batches and sending generated tokens per method (prefill or decode)",
                published,
            ),
            ("concat", "Time spent concatenating batches", joined),
        ):
            family = HistogramMetricFamily(f"tgi_batch_{name}_duration", text, labels=["method"])
            for method, (counts, total) in series.items():
                family.add_metric([method], _buckets(STEP_S, counts), total)
            yield family
        sizes = HistogramMetricFamily("tgi_batch_next_size", "Batch size of the next batch")
        counts = _summed([h.prompts for h in found], len(STEP_REQUESTS) + 1)
        sizes.add_metric([], _buckets(STEP_REQUESTS, counts), sum(h.prompts_sum for h in found))
        yield sizes
        skipped = HistogramMetricFamily("tgi_request_skipped_tokens", "Speculated tokens per request")
        counts = _summed([h.drafted for h in found], len(DRAFTED) + 1)
        skipped.add_metric([], _buckets(DRAFTED, counts), sum(h.drafted_sum for h in found))
        yield skipped


def histograms_of(target: Target) -> list[StepHistograms]:
    """The histograms of the deployment's workers."""
    return [client.histograms for client in target.clients.values()]


def _summed(lists: list[list[int]], length: int) -> list[int]:
    return [sum(column) for column in zip(*lists, strict=True)] or [0] * length


def _buckets(bounds: tuple[float, ...], counts: list[int]) -> list[tuple[str, float]]:
    """Cumulative counts, as in Prometheus' format."""
    texts = [repr(float(bound)) for bound in bounds] + ["+Inf"]
    return list(zip(texts, map(float, accumulate(counts)), strict=True))
