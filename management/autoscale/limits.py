"""How many workers a deployment must and may have."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import msgspec

from management.autoscale.cost import current_price
from management.autoscale.memory import Limit

if TYPE_CHECKING:
    from management.autoscale.config import ScalingConfig
    from management.autoscale.fleet import Fleet
    from management.autoscale.memory import Memory
    from management.autoscale.observation import Observation

NOMINAL_RATE = 1.0
"""Requests per second that a worker is taken to complete until more is known."""
ROUNDING = 1e-9
"""A quotient that misses a whole number by less equals it."""


class Cap(msgspec.Struct, frozen=True):
    """The most workers that may live, and the limit that says so."""

    workers: int
    limit: Limit


def cap_of(config: ScalingConfig, observation: Observation, fleet: Fleet) -> Cap:
    """The lowest limit. Workers that drain take room and cost, so they leave less to start.

    Workers that live fit their hosts: a capacity below their number stops growth and removes none. The price limit is on the
    sum of all workers' prices; an unknown price of the next one counts as over it.
    """
    caps = [Cap(config.max_workers, Limit.MAX_WORKERS)]
    if config.max_price_per_hour is not None:
        caps.append(Cap(_affordable(config.max_price_per_hour, observation.unit_price, fleet), Limit.MAX_PRICE))
    if observation.capacity is not None:
        room = observation.capacity - len(fleet.leaving)
        caps.append(Cap(max(room, fleet.live), Limit.CAPACITY))
    return min(caps, key=lambda cap: cap.workers)


def _affordable(max_price: float, unit_price: float | None, fleet: Fleet) -> int:
    """The workers that may live at this price; one less than live if those cost too much."""
    if current_price(fleet.starting + fleet.ready) > max_price * (1 + ROUNDING):
        return fleet.live - 1
    if unit_price is None:
        return fleet.live
    left = max_price - current_price(fleet.billed)
    if unit_price <= 0:
        return fleet.live if left < 0 else _UNLIMITED
    return fleet.live + max(0, math.floor(min(left / unit_price + ROUNDING, _UNLIMITED)))


_UNLIMITED = 2**31
"""More workers than anybody has. Quotients of extreme numbers are infinite."""


def floor_of(config: ScalingConfig, memory: Memory, cap: Cap) -> int:
    """The fewest workers of an active deployment: at least 1, and as many as the minimum rate needs."""
    floor = config.first_workers
    if config.min_throughput_rate is not None:
        rate = memory.served[0].rate if memory.served else NOMINAL_RATE
        floor = max(floor, math.ceil(min(config.min_throughput_rate / rate - ROUNDING, _UNLIMITED)))
    return min(floor, max(1, cap.workers))
