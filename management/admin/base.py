"""What the registries' admin pages share."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from django.contrib import messages
from unfold.admin import ModelAdmin

from management.services.errors import RegistryError

if TYPE_CHECKING:
    from collections.abc import Callable

    from django.db.models import Model
    from django.http import HttpRequest


class ReadOnlyAdmin(ModelAdmin):
    """Rows are looked at, never changed by hand."""

    def has_add_permission(self, request: HttpRequest, obj: Model | None = None) -> bool:
        """No."""
        return False

    def has_change_permission(self, request: HttpRequest, obj: Model | None = None) -> bool:
        """No."""
        return False

    def has_delete_permission(self, request: HttpRequest, obj: Model | None = None) -> bool:
        """No."""
        return False


class ServiceAdmin(ModelAdmin):
    """Deletes through a service, so that its rules and its audit event apply."""

    def remove(self, obj: Any, actor: str) -> None:
        """The service that removes `obj`."""
        raise RegistryError(f"{obj} cannot be removed")

    def delete_model(self, request: HttpRequest, obj: Any) -> None:
        """One row."""
        run(request, lambda: self.remove(obj, actor(request)))

    def delete_queryset(self, request: HttpRequest, queryset: Any) -> None:
        """Several rows."""
        for obj in queryset:
            self.delete_model(request, obj)


def actor(request: HttpRequest) -> str:
    """Who acts, for the audit event."""
    return f"admin:{request.user.get_username()}"


def run(request: HttpRequest, change: Callable[[], object], done: str = "") -> bool:
    """Make a change and tell how it went."""
    try:
        change()
    except RegistryError as error:
        messages.error(request, str(error))
        return False
    if done:
        messages.success(request, done)
    return True
