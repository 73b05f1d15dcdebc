"""What workers cost. Prices are in USD per hour."""

from __future__ import annotations

from collections.abc import Iterable

from management.autoscale.observation import WorkerState, WorkerView

SECONDS_PER_HOUR = 3600.0


def current_price(workers: Iterable[WorkerView]) -> float:
    """The price per hour of all workers but spares, which cost nothing."""
    return sum(worker.price_per_hour for worker in workers if worker.state is not WorkerState.SPARE)


def cost(price_per_hour: float, seconds: float) -> float:
    """What `seconds` cost, in USD. Time that runs backwards costs nothing."""
    return price_per_hour * max(0.0, seconds) / SECONDS_PER_HOUR
