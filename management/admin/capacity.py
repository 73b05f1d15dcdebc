"""Admin pages of machines and prices."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from django.contrib import admin

from management.admin.base import ServiceAdmin, actor
from management.models import Node, Price
from management.services import capacity

if TYPE_CHECKING:
    from django.http import HttpRequest


@admin.register(Node)
class NodeAdmin(ServiceAdmin):
    """Machines. They report themselves; the operator sets what they are for, and removes those that have gone."""

    list_display = ["name", "provider", "region", "cpus", "gpu_type", "gpus", "max_workers", "seen_at"]
    fields = ["name", "address", "cpus", "memory_bytes", "gpus", "provider", "region", "gpu_type", "max_workers"]
    readonly_fields = ["name", "address", "cpus", "memory_bytes", "gpus"]

    def has_add_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        """Machines report themselves."""
        return False

    def save_model(self, request: HttpRequest, obj: Any, form: Any, change: bool) -> None:
        """Change through the service."""
        capacity.change_node(obj, actor(request))

    def remove(self, obj: Node, actor: str) -> None:
        """Remove through the service."""
        capacity.remove_node(obj, actor)


@admin.register(Price)
class PriceAdmin(ServiceAdmin):
    """The price table."""

    list_display = ["gpu_type", "provider", "region", "spot", "price_per_hour"]
    search_fields = ["gpu_type", "provider", "region"]

    def save_model(self, request: HttpRequest, obj: Any, form: Any, change: bool) -> None:
        """Set through the service."""
        capacity.set_price(obj, actor(request))

    def remove(self, obj: Price, actor: str) -> None:
        """Remove through the service."""
        capacity.remove_price(obj, actor)
