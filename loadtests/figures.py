"""The figures of a stage: what its samples say of throughput, waiting and failures."""

from __future__ import annotations

import math
import statistics
from collections import Counter

import msgspec

from loadtests.samples import Outcome, Sample, Window, of_window


def percentile(values: list[float], share: float) -> float | None:
    """The nearest-rank percentile for `share` in [0, 1]; None without values."""
    if not values:
        return None
    ordered = sorted(values)
    # Less a little, because a share such as 0.07 is no binary fraction.
    rank = math.ceil(share * len(ordered) - 1e-9)
    return ordered[max(rank, 1) - 1]


def median(values: list[float]) -> float | None:
    """None without values."""
    return statistics.median(values) if values else None


def ratio(value: float | None, base: float | None) -> float | None:
    """None where one of them was not measured, or nothing can be said."""
    return value / base if value is not None and base else None


class StageFigures(msgspec.Struct):
    """Of one stage. Gaps are over all streams. Those of one user have no useful median: tokens that a
    step has drafted come together.
    """

    stage: str
    users: int
    seconds: float
    requests: int
    outcomes: dict[str, int]
    tokens_per_s: float
    answers_per_s: float
    user_tokens_per_s: float | None
    """The median over streams of the tokens after the first by their time."""
    ttft_p50_ms: float | None
    ttft_p95_ms: float | None
    gap_mean_ms: float | None
    gap_p95_ms: float | None
    gap_p99_ms: float | None
    total_p50_ms: float | None
    total_p95_ms: float | None
    by_user: dict[str, dict[str, int]]
    """The outcomes of each class of users."""


def stage_figures(samples: list[Sample], window: Window) -> StageFigures:
    """The figures of what was sent in a window. Tokens count when they came, also those of requests that were sent before."""
    sent = of_window(samples, window)
    good = [sample for sample in sent if sample.outcome is Outcome.OK]
    first = [sample.ttft_ms for sample in good if sample.ttft_ms is not None]
    gaps = [gap for sample in good for gap in sample.gaps_ms]
    totals = [sample.total_ms for sample in good]
    tokens = sum(
        sample.tokens_between(window.begin_s, window.end_s) for sample in samples if sample.outcome is Outcome.OK
    )
    by_user: dict[str, Counter[str]] = {}
    for sample in sent:
        by_user.setdefault(sample.user, Counter())[sample.outcome] += 1
    return StageFigures(
        stage=window.stage,
        users=window.users,
        seconds=window.seconds,
        requests=len(sent),
        outcomes=dict(Counter(str(sample.outcome) for sample in sent)),
        tokens_per_s=tokens / max(1e-9, window.seconds),
        answers_per_s=sum(ended_in(sample, window) for sample in samples) / max(1e-9, window.seconds),
        user_tokens_per_s=median([speed for sample in good if (speed := user_speed(sample)) is not None]),
        ttft_p50_ms=median(first),
        ttft_p95_ms=percentile(first, 0.95),
        gap_mean_ms=statistics.fmean(gaps) if gaps else None,
        gap_p95_ms=percentile(gaps, 0.95),
        gap_p99_ms=percentile(gaps, 0.99),
        total_p50_ms=median(totals),
        total_p95_ms=percentile(totals, 0.95),
        by_user={user: dict(counts) for user, counts in by_user.items()},
    )


def user_speed(sample: Sample) -> float | None:
    """Tokens per second that a stream's reader saw after the first piece; None for whole answers."""
    if sample.tokens < 2 or not sample.gaps_ms:
        return None
    return (sample.tokens - 1) / max(1e-9, sum(sample.gaps_ms) / 1e3)


def ended_in(sample: Sample, window: Window) -> bool:
    """Whether it was answered well in this time."""
    return sample.outcome is Outcome.OK and window.begin_s <= sample.end_s < window.end_s


def failures(samples: list[Sample], may_refuse: bool = False) -> list[Sample]:
    """Those that were not answered as they should be."""
    accepted = {Outcome.OK, Outcome.REFUSED} if may_refuse else {Outcome.OK}
    return [sample for sample in samples if sample.outcome not in accepted]
