"""The scaling rules of one deployment, validated."""

from __future__ import annotations

from enum import StrEnum

import msgspec

MIN_WINDOW_S = 5.0
MAX_TICK_S = 5.0
MIN_TICK_S = 1.0
TICKS_PER_WINDOW = 5
STALE_TICKS = 3
"""After so many ticks without news, a report is stale, and a tick was delayed."""
MAX_FLAP_FACTOR = 8


class Strategy(StrEnum):
    """What is compared with the thresholds."""

    TTFT = "ttft_latency_sec"
    RPS = "rps_per_worker"
    E2E = "e2e_latency_sec"


class Fault(StrEnum):
    """What is wrong with scaling rules."""

    WORKERS = "workers"
    THRESHOLDS = "thresholds"
    TIMES = "times"
    ZERO_WITH_MINIMUM = "zero_with_minimum"
    PRICE = "price"
    THROUGHPUT = "throughput"


class InvalidScaling(ValueError):
    """The scaling rules contradict themselves. `fault` says which of them."""

    def __init__(self, fault: Fault) -> None:
        super().__init__(fault.value)
        self.fault = fault


class ScalingConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The limits, thresholds and times of one deployment.

    `upper` and `lower` are seconds for TTFT and E2E, and requests per second and ready worker for RPS. A window below 5 s
    becomes 5 s. `max_price_per_hour` is in USD; None is no limit. `min_throughput_rate` is in requests per second; None is
    no minimum. `fast` keeps one spare worker. `immediate_scale_down` removes workers above a limit one per tick, not one per
    down window. Raises InvalidScaling.
    """

    min_workers: int = 0
    max_workers: int = 100
    strategy: Strategy = Strategy.TTFT
    upper: float = 1.0
    lower: float = 0.2
    up_window_s: float = 300.0
    down_window_s: float = 300.0
    start_timeout_s: float = 1200.0
    drain_timeout_s: float = 1200.0
    scale_to_zero: bool = False
    idle_timeout_s: float = 1800.0
    max_price_per_hour: float | None = None
    min_throughput_rate: float | None = None
    fast: bool = False
    immediate_scale_down: bool = False

    def __post_init__(self) -> None:
        times = (self.up_window_s, self.down_window_s, self.start_timeout_s, self.drain_timeout_s, self.idle_timeout_s)
        valid = {
            Fault.WORKERS: 0 <= self.min_workers <= self.max_workers and self.max_workers >= 1,
            Fault.THRESHOLDS: 0 <= self.lower < self.upper,
            Fault.TIMES: all(time >= 0 for time in times),
            Fault.ZERO_WITH_MINIMUM: not (self.scale_to_zero and self.min_workers),
            Fault.PRICE: self.max_price_per_hour is None or self.max_price_per_hour > 0,
            Fault.THROUGHPUT: self.min_throughput_rate is None or self.min_throughput_rate > 0,
        }
        for fault, holds in valid.items():
            if not holds:
                raise InvalidScaling(fault)
        msgspec.structs.force_setattr(self, "up_window_s", max(self.up_window_s, MIN_WINDOW_S))
        msgspec.structs.force_setattr(self, "down_window_s", max(self.down_window_s, MIN_WINDOW_S))

    @property
    def tick_s(self) -> float:
        """The time between two decisions: 1 to 5 s."""
        return max(MIN_TICK_S, min(MAX_TICK_S, min(self.up_window_s, self.down_window_s) / TICKS_PER_WINDOW))

    @property
    def recent_s(self) -> float:
        """The part of the up window in which a threshold must still be exceeded."""
        return max(self.up_window_s / TICKS_PER_WINDOW, 2 * self.tick_s)

    @property
    def stale_s(self) -> float:
        """The age from which a report says nothing."""
        return STALE_TICKS * self.tick_s

    @property
    def history_s(self) -> float:
        """The largest window that a decision may look at."""
        return max(self.up_window_s, self.down_window_s * MAX_FLAP_FACTOR)

    @property
    def first_workers(self) -> int:
        """How many workers a sleeping deployment starts with."""
        return max(1, self.min_workers)
