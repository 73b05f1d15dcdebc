"""What the registries' admin pages share."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from django.contrib import messages
from django.http import HttpResponseRedirect
from django.template.response import TemplateResponse
from django.urls import reverse
from unfold.admin import ModelAdmin

from management.services.errors import RegistryError

if TYPE_CHECKING:
    from collections.abc import Callable

    from django.db.models import Model
    from django.http import HttpRequest, HttpResponse


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

    def confirmed(self, request: HttpRequest, question: str, change: Callable[[], object], done: str) -> HttpResponse:
        """A button that changes something. Buttons are links: following one asks, and the form that it shows does it."""
        back = reverse(f"admin:{self.opts.app_label}_{self.opts.model_name}_changelist")
        if request.method == "POST":
            run(request, change, done)
            return HttpResponseRedirect(back)
        context = {**self.admin_site.each_context(request), "opts": self.opts, "title": question, "question": question}
        return TemplateResponse(request, "admin/confirm_action.html", {**context, "back": back})

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
