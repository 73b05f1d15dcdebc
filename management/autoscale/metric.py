"""The metric of a strategy over a window, with its number of samples."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from management.autoscale.config import ScalingConfig, Strategy

if TYPE_CHECKING:
    from collections.abc import Iterator

    from management.autoscale.signals import History


class Measure(msgspec.Struct, frozen=True):
    """A metric over a window of `window_s`. `value` is None without samples; its unit is the thresholds'."""

    value: float | None
    samples: int
    window_s: float

    def exceeds(self, threshold: float) -> bool:
        """Whether there is a value, strictly above."""
        return self.value is not None and self.value > threshold

    def is_below(self, threshold: float) -> bool:
        """Whether there is a value, strictly below."""
        return self.value is not None and self.value < threshold


def measure(config: ScalingConfig, history: History, now: float, window_s: float, ready: int) -> Measure:
    """The strategy's metric over (now - window_s, now], with `ready` workers now.

    TTFT and E2E are means, in seconds. A request that still waits counts with its age once that exceeds the upper threshold,
    so requests that are stuck do not look like no load. RPS is the rate of all arrivals, rejected ones included, per ready
    worker.
    """
    slices = list(history.within(now, window_s))
    if config.strategy is Strategy.RPS:
        arrivals = sum(piece.arrivals + piece.rejected for piece in slices)
        value = arrivals / window_s / ready if arrivals and ready else None
        return Measure(value, arrivals, window_s)
    if config.strategy is Strategy.TTFT:
        samples = sum(piece.first_tokens for piece in slices)
        total_s = sum(piece.ttft_total_s for piece in slices)
    else:
        samples = sum(piece.completions for piece in slices)
        total_s = sum(piece.e2e_total_s for piece in slices)
    ages = [age for age in _ages_s(config, history, now) if age > config.upper]
    samples += len(ages)
    return Measure((total_s + sum(ages)) / samples if samples else None, samples, window_s)


def _ages_s(config: ScalingConfig, history: History, now: float) -> Iterator[float]:
    """How long requests had waited, when they were reported, for what the strategy measures.

    The report's own age is not added: most of these requests have been served since.
    """
    for gauges in history.valid(now, config.stale_s):
        yield from gauges.waiting_ages_s if config.strategy is Strategy.TTFT else gauges.running_ages_s
