"""Writes the price table and the machines' limits, and says which machines there are."""

from __future__ import annotations

import os
from datetime import timedelta
from typing import TYPE_CHECKING

from django.core.exceptions import ValidationError
from django.db import transaction
from django.db.models import Q
from django.db.models.functions import Now

from management.models import Node, Worker
from management.services import audit
from management.services.errors import RegistryError, refused

if TYPE_CHECKING:
    from django.db.models import QuerySet

    from management.models import Price

GONE_AFTER = timedelta(minutes=5)
"""A machine that has not reported for so long and runs no worker has gone. Reports come every 30 s."""


def present_nodes() -> QuerySet[Node]:
    """The machines that report, or run workers."""
    busy = Worker.objects.filter(state__in=Worker.LIVE).values("node")
    return Node.objects.filter(Q(seen_at__gt=Now() - GONE_AFTER) | Q(name__in=busy))


def counted_nodes() -> QuerySet[Node]:
    """The machines on which this process may count for workers: those that are present, and its own, which may not have reported
    since it started.
    """
    return present_nodes() | Node.objects.filter(name=os.uname().nodename)


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


@transaction.atomic
def remove_node(node: Node, actor: str) -> None:
    """Remove a machine that has gone. Raises RegistryError for one that is there, which would report itself again."""
    if present_nodes().filter(pk=node.pk).exists():
        raise RegistryError(f"{node.name} is there: it has workers, or has reported in the last five minutes")
    audit.record(actor, "node.remove", node.name, max_workers=node.max_workers)
    node.delete()
