"""Prints how the autoscaler's rules behave: vectors passed, flaps per simulated hour, and time to converge.

    python -m tools.docs.autoscale_table [--hours 12]

A flap is a change of direction between adding and removing a worker under load, also where it follows the load. A constant load has converged at the last
change of the number of workers; the ideal is the fewest workers below the upper threshold.
"""

from __future__ import annotations

import argparse
import math
import random
from itertools import pairwise

from management.autoscale.config import ScalingConfig, Strategy
from management.autoscale.decision import Rule
from tests.unit.autoscale.simulation import Load, Simulation, ttft_s
from tests.unit.autoscale.vectors import VECTORS

HOUR_S = 3600.0
CHANGING: dict[str, Load] = {
    "spikes of 5 s every 10 min": lambda at: 50.0 if at % 600 < 5 else 0.0,
    "sawtooth of 15 min": lambda at: 8.0 * (at % 900) / 900,
    "square of 12 min": lambda at: 6.0 if at % 720 < 360 else 0.5,
    "sine of 2 h": lambda at: 4.0 + 4.0 * math.sin(at / 7200 * 2 * math.pi),
    "a request an hour": lambda at: 0.2 if at % HOUR_S < 5 else 0.0,
    "noise": lambda at: random.Random(int(at)).expovariate(0.5),
}
CONSTANT = (0.5, 1.5, 3.0, 6.0, 7.9)
BANDS = {"wide": 0.2, "narrow": 0.9}


def flaps(simulation: Simulation) -> int:
    """How often adding turned into removing, or the reverse."""
    changes = [d.rule for d in simulation.decisions if d.rule in (Rule.UP, Rule.DOWN) and d.actions]
    return sum(earlier is not later for earlier, later in pairwise(changes))


def ideal(config: ScalingConfig, rate: float) -> int:
    """The fewest workers whose metric does not exceed the upper threshold."""
    if config.strategy is Strategy.RPS:
        return math.ceil(rate / config.upper)
    return next(count for count in range(1, 1000) if ttft_s(rate, count) <= config.upper)


def row(*cells: object) -> None:
    """One line of a table."""
    print("| " + " | ".join(str(cell) for cell in cells) + " |")


def header(*cells: str) -> None:
    """The first two lines of a table."""
    print()
    row(*cells)
    row(*("---" for _ in cells))


def print_vectors() -> None:
    """Which vectors are decided to the second."""
    header("vector", "decisions", "passed")
    for vector in VECTORS:
        row(vector.name, len(vector.events), "yes" if tuple(vector.run().events) == vector.events else "NO")


def print_changing(hours: float) -> None:
    """Flaps under loads that change."""
    header("load", "strategy", "band", "changes", "flaps per hour", "most workers")
    for name, load in CHANGING.items():
        for strategy in (Strategy.TTFT, Strategy.RPS):
            for band, lower in BANDS.items():
                config = ScalingConfig(strategy=strategy, lower=lower, max_workers=16, scale_to_zero=True)
                simulation = Simulation(config, load).run(hours * HOUR_S)
                changes = sum(d.rule in (Rule.UP, Rule.DOWN) and bool(d.actions) for d in simulation.decisions)
                most = max(event.workers for event in simulation.events)
                row(name, strategy.value, band, changes, f"{flaps(simulation) / hours:.2f}", most)


def print_constant(hours: float) -> None:
    """The time in which a constant load converges, from one worker."""
    header("requests per second", "strategy", "ideal", "reached", "converged after", "windows")
    for rate in CONSTANT:
        for strategy in (Strategy.TTFT, Strategy.RPS):
            config = ScalingConfig(strategy=strategy, max_workers=16)
            simulation = Simulation(config, lambda at, rate=rate: rate).run(hours * HOUR_S)
            last = simulation.events[-1].at
            windows = f"{last / config.up_window_s:.1f}"
            row(rate, strategy.value, ideal(config, rate), simulation.live, f"{last:.0f} s", windows)


def main() -> None:
    """All tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hours", type=float, default=12.0, help="Simulated hours of each load.")
    hours = parser.parse_args().hours
    print_vectors()
    print_changing(hours)
    print_constant(hours)


if __name__ == "__main__":
    main()
