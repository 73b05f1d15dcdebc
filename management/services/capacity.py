"""Writes the price table and the machines' limits, and answers what a worker costs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from django.core.exceptions import ValidationError
from django.db import transaction

from management.autoscale.cost import PriceChoice, PriceFilter, cheapest
from management.models import Price
from management.services import audit
from management.services.errors import refused

if TYPE_CHECKING:
    from collections.abc import Iterable

    from management.models import Deployment, Node


@transaction.atomic
def set_price(price: Price, actor: str) -> Price:
    """Create or change a row of the price table. Raises RegistryError."""
    try:
        price.full_clean()
    except ValidationError as error:
        raise refused(error) from error
    price.save()
    audit.record(actor, "price.set", str(price), provider=price.provider, region=price.region, spot=price.spot)
    return price


@transaction.atomic
def remove_price(price: Price, actor: str) -> None:
    """Remove a row of the price table."""
    audit.record(actor, "price.remove", str(price))
    price.delete()


@transaction.atomic
def change_node(node: Node, actor: str) -> None:
    """Set what an operator may change of a machine. Raises RegistryError."""
    try:
        node.full_clean()
    except ValidationError as error:
        raise refused(error) from error
    node.save(update_fields=["provider", "region", "gpu_type", "max_workers"])
    audit.record(actor, "node.change", node.name, max_workers=node.max_workers)


def worker_price(deployment: Deployment, prices: Iterable[Price]) -> float | None:
    """USD per hour of one worker: the cheapest row that its placement allows, times its accelerators; None if no row
    matches.
    """
    providers = {each["name"]: frozenset(each.get("regions") or ()) for each in deployment.cloud_providers}
    choices = [
        PriceChoice(provider, region, price.gpu_type, price.spot, price.price_per_hour)
        for price in prices
        # A row without a provider or region is the price at each one that the deployment allows.
        for provider in ([price.provider] if price.provider else providers or [""])
        for region in ([price.region] if price.region else providers.get(provider) or [""])
    ]
    wanted = PriceFilter(providers, frozenset({deployment.gpu_type}), deployment.spot)
    found = cheapest(choices, wanted)
    known = None if found is None else found.price_per_hour
    return None if known is None else known * max(1, deployment.gpus_per_worker)
