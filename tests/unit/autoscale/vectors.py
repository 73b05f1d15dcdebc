"""Loads with the decisions that the rules must take, to the second."""

from __future__ import annotations

from dataclasses import dataclass

from management.autoscale.config import ScalingConfig, Strategy
from management.autoscale.decision import Rule
from tests.unit.autoscale.simulation import Event, Load, Simulation

READY = None


@dataclass(frozen=True)
class Vector:
    """A load until `until` seconds, and everything that happens."""

    name: str
    config: ScalingConfig
    load: Load
    until: float
    events: tuple[Event, ...]

    def run(self) -> Simulation:
        """The deployment after the load."""
        return Simulation(self.config, self.load).run(self.until)


def events(*rows: tuple[float, Rule | None, int]) -> tuple[Event, ...]:
    """Times, what happened, and the workers afterwards."""
    return tuple(Event(*row) for row in rows)


WOKEN = ((0, Rule.WAKE, 1), (30, READY, 1))

VECTORS = (
    Vector(
        "A: TTFT, up to 4, down and to zero",
        ScalingConfig(scale_to_zero=True),
        lambda at: 3.0 if at < 4000 else 0.0,
        9000,
        events(
            *WOKEN,
            (330, Rule.UP, 2),
            (360, READY, 2),
            (660, Rule.UP, 3),
            (690, READY, 3),
            (990, Rule.UP, 4),
            (1020, READY, 4),
            (4295, Rule.DOWN, 3),
            (4595, Rule.DOWN, 2),
            (4895, Rule.DOWN, 1),
            (5795, Rule.ZERO, 0),
        ),
    ),
    Vector(
        "B: rate, doubling, and the lower threshold is strict",
        ScalingConfig(strategy=Strategy.RPS, max_workers=8),
        lambda at: 6.0 if at < 3000 else 1.0,
        9000,
        events(
            *WOKEN,
            (330, Rule.UP, 2),
            (360, READY, 2),
            (660, Rule.UP, 4),
            (690, READY, 4),
            (690, READY, 4),
            (990, Rule.UP, 6),
            (1020, READY, 6),
            (1020, READY, 6),
            (3285, Rule.DOWN, 5),
        ),
    ),
    Vector(
        "C: rate, no flapping in a narrow band",
        ScalingConfig(strategy=Strategy.RPS, lower=0.9, max_workers=8),
        lambda at: 3.2 if at < 6000 else 1.0,
        12000,
        events(
            *WOKEN,
            (330, Rule.UP, 2),
            (360, READY, 2),
            (660, Rule.UP, 4),
            (690, READY, 4),
            (690, READY, 4),
            (6025, Rule.DOWN, 3),
            (6325, Rule.DOWN, 2),
            (6625, Rule.DOWN, 1),
        ),
    ),
    Vector(
        "D: TTFT, two short loads",
        ScalingConfig(scale_to_zero=True, idle_timeout_s=600),
        lambda at: 1.0 if at < 100 or 2000 <= at < 2100 else 0.0,
        6000,
        events(*WOKEN, (695, Rule.ZERO, 0), (2000, Rule.WAKE, 1), (2030, READY, 1), (2695, Rule.ZERO, 0)),
    ),
    Vector("E: TTFT, steady load within the band", ScalingConfig(), lambda at: 0.8, 20000, events(*WOKEN)),
)
