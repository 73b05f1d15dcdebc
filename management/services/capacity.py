"""Writes the price table and the machines' limits."""

from __future__ import annotations

from typing import TYPE_CHECKING

from django.core.exceptions import ValidationError
from django.db import transaction

from management.services import audit
from management.services.errors import refused

if TYPE_CHECKING:
    from management.models import Node, Price


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
