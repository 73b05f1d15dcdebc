"""Compares the figures of a run with its targets."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from loadtests.stream import Samples


def percentile(values: list[float], share: float) -> float:
    """The nearest-rank percentile for `share` in [0, 1]; NaN without values."""
    if not values:
        return float("nan")
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def figures(samples: Samples) -> dict[str, float]:
    """The figures of a run by the targets' names."""
    return {
        "fail_ratio": samples.failures / max(1, samples.requests),
        "ttft_p50_ms": percentile(samples.ttft_ms, 0.50),
        "ttft_p95_ms": percentile(samples.ttft_ms, 0.95),
        "inter_token_p50_ms": percentile(samples.inter_token_ms, 0.50),
        "inter_token_p99_ms": percentile(samples.inter_token_ms, 0.99),
        "end_to_end_p95_ms": percentile(samples.end_to_end_ms, 0.95),
        "min_tokens_per_s": samples.tokens_per_s,
    }


def broken_targets(path: Path, measured: dict[str, float]) -> list[str]:
    """A line for every missed target. Targets that begin with `min_` are lower bounds, the others upper bounds."""
    broken = []
    for name, target in tomllib.loads(path.read_text()).items():
        if name not in measured:
            raise KeyError(f"{path} names {name}, which is not measured; known: {', '.join(measured)}")
        value = measured[name]
        met = value >= target if name.startswith("min_") else value <= target
        if not met:
            broken.append(f"{name}: {value:.4g}, target {target:g}")
    return broken
