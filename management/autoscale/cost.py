"""What workers cost, and the cheapest place for the next one. Prices are in USD per hour."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import msgspec

from management.autoscale.observation import WorkerState, WorkerView

SECONDS_PER_HOUR = 3600.0


def current_price(workers: Iterable[WorkerView]) -> float:
    """The price per hour of all workers but spares, which cost nothing."""
    return sum(worker.price_per_hour for worker in workers if worker.state is not WorkerState.SPARE)


def cost(price_per_hour: float, seconds: float) -> float:
    """What `seconds` cost, in USD. Time that runs backwards costs nothing."""
    return price_per_hour * max(0.0, seconds) / SECONDS_PER_HOUR


class PriceChoice(msgspec.Struct, frozen=True):
    """A kind of worker that can be had. A price of None is unknown."""

    provider: str
    region: str
    gpu: str
    spot: bool
    price_per_hour: float | None


class PriceFilter(msgspec.Struct, frozen=True):
    """Which choices match. No provider, no GPU, and no region of a provider mean any."""

    regions: Mapping[str, frozenset[str]] = {}
    gpus: frozenset[str] = frozenset()
    allow_spot: bool = False

    def matches(self, choice: PriceChoice) -> bool:
        """Whether the choice may be taken."""
        if self.regions and choice.provider not in self.regions:
            return False
        regions = self.regions.get(choice.provider)
        return (
            (not regions or choice.region in regions)
            and (not self.gpus or choice.gpu in self.gpus)
            and (self.allow_spot or not choice.spot)
        )


def cheapest(choices: Iterable[PriceChoice], wanted: PriceFilter) -> PriceChoice | None:
    """The cheapest choice that matches, on demand before spot at one price. Unknown prices come last; None if none match."""
    matching = [choice for choice in choices if wanted.matches(choice)]
    return min(matching, key=_order, default=None)


def _order(choice: PriceChoice) -> tuple[bool, float, bool, str, str, str]:
    price = choice.price_per_hour
    return (price is None, price or 0.0, choice.spot, choice.provider, choice.region, choice.gpu)
