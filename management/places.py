"""Where a deployment's next worker may run, from its placement fields: pure functions, without a launcher.

Machines are known by labels (`management.launchers.place`): `market` (onprem, ondemand, spot), `accelerator`, `provider`, `region`,
`node-type`, `onprem-node-id`. The order is own machines, spot, on demand; and the wanted accelerator before any other.
"""

from __future__ import annotations

import math
import re
from typing import TYPE_CHECKING, Any

from management.launchers.place import ACCELERATOR, MARKET, NODE_TYPE, ON_PREM_ID, PROVIDER, REGION, Place

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from management.models import Deployment, Price
    from management.watched import Watched

ON_PREM, ON_DEMAND, SPOT, NO_SPOT = "onprem", "ondemand", "spot", "!spot"
ON_PREM_PROVIDER = "ONPREM"
"""The provider of own machines in the price table."""
VARIANTS = ("", "_PCIE", "_SXM", "_PCIE_NVLINK", "_SXM_NVLINK")
"""Ends of the names of an accelerator's variants."""
LABEL = re.compile(r"[A-Za-z0-9]([A-Za-z0-9_.-]{0,61}[A-Za-z0-9])?")
"""What a label's value may be. What is none, no machine has."""
ROUNDING = 1e-9

Wanted = dict[str, tuple[str, ...]]
"""The values that each label may have."""


def place_of(deployment: Deployment, prices: Iterable[Price], left: float | None) -> Place:
    """The machines that the next worker may have. `left`: USD per hour that it may cost; None is no limit. A machine whose price is
    unknown counts as over the limit.
    """
    gpus, wanted = gpus_of(deployment), _kinds(deployment)
    priced = [(each, 0.0) for each in wanted] if left is None else _affordable(wanted, list(prices), left, gpus)
    chosen = [(labels, price) for each, price in priced if (labels := _selector(each)) is not None]
    return Place(tuple(labels for labels, _ in chosen), gpus, max((price for _, price in chosen), default=0.0))


def least_price(deployment: Deployment, prices: Iterable[Price]) -> float | None:
    """USD per hour of a worker on the cheapest kind of machine that the placement allows; None if no price of one is known."""
    priced = _affordable(_kinds(deployment), list(prices), math.inf, gpus_of(deployment))
    return min((price for _, price in priced), default=None)


def gpus_of(deployment: Deployment) -> int:
    """Accelerators of a worker. With tensor parallelism its processes share one machine, so all of them are on one."""
    ranks = int(deployment.engine_options.get("tensor_parallel_size", 1))
    return max(deployment.gpus_per_worker, ranks if ranks > 1 else 0, int(bool(deployment.gpu_type)))


def left_of(deployment: Deployment, mine: Iterable[Watched]) -> float | None:
    """What one more worker beside `mine` may cost per hour; None is no limit."""
    if deployment.max_price_per_hour is None:
        return None
    return deployment.max_price_per_hour - sum(each.worker.price_per_hour for each in mine if not each.spare)


def price_at(labels: Mapping[str, str], gpus: int, prices: Iterable[Price]) -> float | None:
    """USD per hour of a worker on a machine with these labels: the row that says most of it; None if none does."""
    wanted: Wanted = {name: (value,) for name, value in labels.items()}
    accelerator = labels.get(ACCELERATOR, "") if gpus else ""
    rows = [price for price in prices if price.gpu_type == accelerator and _fits(wanted, price)]
    best = max(rows, key=_precision, default=None)
    return None if best is None else best.price_per_hour * max(1, gpus)


def _kinds(deployment: Deployment) -> list[Wanted]:
    """The kinds of machines that the placement allows, in the order of preference."""
    accelerators: list[Wanted] = [{}]
    if deployment.gpu_type:
        names = [deployment.gpu_type + end for end in (VARIANTS if deployment.expand_gpu_types else ("",))]
        accelerators = [{ACCELERATOR: tuple(names)}, *([{}] if deployment.use_other_gpus else [])]
    return [{**tier, **accelerator} for accelerator in accelerators for tier in _tiers(deployment)]


def _tiers(deployment: Deployment) -> list[Wanted]:
    """The same kinds without the accelerator."""
    types: Wanted = {NODE_TYPE: tuple(deployment.instance_types)} if deployment.instance_types else {}
    providers = [_provider(each) for each in deployment.cloud_providers]
    markets = [SPOT, ON_DEMAND] if deployment.spot else [ON_DEMAND]
    cloud = [{MARKET: (market,), **each, **types} for market in markets for each in providers or [{}]]
    if deployment.use_on_prem:
        ids: Wanted = {ON_PREM_ID: tuple(deployment.on_prem_node_ids)} if deployment.on_prem_node_ids else {}
        return [{MARKET: (ON_PREM,), **ids}, *(cloud if deployment.use_cloudburst else [])]
    if providers:
        return cloud
    anywhere: Wanted = {MARKET: (NO_SPOT,), **types}  # also machines without labels
    return [{MARKET: (SPOT,), **types}, anywhere] if deployment.spot else [anywhere]


def _provider(wanted: Mapping[str, Any]) -> Wanted:
    regions = tuple(wanted.get("regions") or ())
    return {PROVIDER: (wanted["name"],), **({REGION: regions} if regions else {})}


def _affordable(wanted: list[Wanted], prices: list[Price], left: float, gpus: int) -> list[tuple[Wanted, float]]:
    """The kinds of machines that cost no more than `left`, each with the most that it may cost. Each kind in `wanted` is narrowed to
    what one row of the price table says, the cheapest row first.
    """
    found: dict[str, tuple[Wanted, float]] = {}
    for each in wanted:
        for row in sorted(_rows(each, prices, gpus), key=lambda row: row.price_per_hour):
            own = row.provider == ON_PREM_PROVIDER
            said = ((PROVIDER, "" if own else row.provider), (REGION, row.region), (ACCELERATOR, row.gpu_type))
            narrow = each | {label: (value,) for label, value in said if value}
            # A row without a provider or region has exceptions: such a machine may cost what another row says.
            others = [other for other in _rows(narrow, prices, gpus) if _precision(other) >= _precision(row)]
            most = max(other.price_per_hour for other in others) * max(1, gpus)
            if most <= left * (1 + ROUNDING):
                found.setdefault(repr(narrow), (narrow, most))
    return list(found.values())


def _rows(wanted: Wanted, prices: list[Price], gpus: int) -> list[Price]:
    """What such a machine may cost."""
    accelerators = wanted.get(ACCELERATOR, ()) if gpus else ("",)
    return [
        row
        for row in prices
        if _fits(wanted, row)
        and bool(row.gpu_type) == bool(gpus)
        and (not accelerators or row.gpu_type in accelerators)
    ]


def _precision(row: Price) -> int:
    """How much the row says of a place; of two prices of one machine, that of the more precise row counts."""
    return bool(row.provider) + bool(row.region)


def _fits(wanted: Wanted, row: Price) -> bool:
    """Whether the row may be the price of such a machine, whatever its accelerator."""
    own = wanted.get(MARKET) == (ON_PREM,)
    provider = (ON_PREM_PROVIDER,) if own else wanted.get(PROVIDER, ())
    regions = wanted.get(REGION, ())
    return (
        row.spot == (wanted.get(MARKET) == (SPOT,))
        and (not row.provider or not provider or row.provider in provider)
        and (not row.region or not regions or row.region in regions)
    )


def _selector(wanted: Wanted) -> dict[str, str] | None:
    """The labels as Ray writes them; None if no machine can have them."""
    found = {}
    for name, values in wanted.items():
        known = [value for value in values if LABEL.fullmatch(value) or (name, value) == (MARKET, NO_SPOT)]
        if not known:
            return None
        found[name] = known[0] if len(known) == 1 else f"in({','.join(known)})"
    return found
