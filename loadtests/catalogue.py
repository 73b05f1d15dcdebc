"""Every figure that a target may bound: whether more is better, and which bounds make sense.

All but counts and times that the specification of a server fixes are ratios to what the same run measured just before: a slow
machine slows both.
"""

from __future__ import annotations

import msgspec


class Figure(msgspec.Struct, frozen=True):
    """`at_least`: the target is a lower bound. `low` and `high` are what a target may be."""

    about: str
    at_least: bool = False
    low: float = 0.0
    high: float = 1000.0


FIGURES = {
    "failures": Figure("requests that were not answered as they should be", high=1_000_000),
    "throughput_share": Figure("tokens/s of streams, as a share of the engine's own", at_least=True, high=2),
    "ttft_p95_multiple": Figure("TTFT p95, as a multiple of the TTFT p50 of one user alone", low=0.01),
    "gap_p95_multiple": Figure("gap p95, as a multiple of the mean gap of one user alone", low=0.01),
    "calm_ttft_multiple": Figure("TTFT p50 of one user after load, as a multiple of that before", low=0.01),
    "calm_gap_multiple": Figure("mean gap of one user after load, as a multiple of that before", low=0.01),
    "silent_users": Figure("classes of users that had no good answer", high=100),
    "goodput_share": Figure("tokens/s of good answers, as a share of the most", at_least=True, high=2),
    "arrivals_share": Figure("requests of open loops that were sent, as a share of the plan", at_least=True, high=1),
    "refusal_p95_ms": Figure("p95 of the time until a refusal", low=0.01, high=60_000),
    "refusal_p95_multiple": Figure("the same, as a multiple of the TTFT p50 of one user alone", low=0.01),
    "untold_refusals": Figure("refusals that do not say when to try again", high=1_000_000),
    "recovery_s": Figure(
        "seconds from the end of the overload until every request is answered in time", low=0.01, high=600
    ),
    "burst_multiple": Figure("time for a burst, as a multiple of what the engine needs for its tokens", low=0.01),
    "wake_multiple": Figure("first token of a sleeping deployment, as a multiple of the server's start", low=0.01),
    "adapter_throughput_share": Figure("tokens/s with adapters, as a share of that without", at_least=True, high=2),
    "neighbour_gap_p95_multiple": Figure(
        "gap p95 of short prompts beside long ones, as a multiple of that alone", low=0.01
    ),
    "prefix_ttft_share": Figure(
        "TTFT p50 of prompts that share a prefix, as a share of that of others", low=0.01, high=10
    ),
    "turn_ttft_multiple": Figure("TTFT p50 of a conversation's last turn, as a multiple of its first", low=0.01),
    "rss_slope_mib_per_min": Figure("growth of the memory of the server's processes in the second half", high=10_000),
    "descriptors_left": Figure("open descriptors of the server more than before", high=100_000),
    "threads_left": Figure("threads of the server more than before", high=100_000),
    "tasks_left": Figure("tasks of the server's event loop more than before", high=100_000),
    "kv_usage_left": Figure("share of the KV cache that is in use when nothing runs", high=1),
    "gauges_left": Figure("sum of the gauges of running and waiting requests when nothing runs", high=1_000_000),
}
