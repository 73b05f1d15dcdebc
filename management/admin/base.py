"""Base classes of the registries' admin pages."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from django.contrib import messages
from django.contrib.admin.helpers import ACTION_CHECKBOX_NAME
from django.core.exceptions import BadRequest, ValidationError
from django.db import IntegrityError
from django.http import Http404, HttpResponseRedirect
from django.template.response import TemplateResponse
from django.urls import reverse
from unfold.admin import ModelAdmin

from management.services.errors import RegistryError

if TYPE_CHECKING:
    from collections.abc import Callable

    from django.db.models import Model
    from django.http import HttpRequest, HttpResponse


class CheckedListAdmin(ModelAdmin):
    """A page whose list refuses (400) what can be neither a row's id nor a filter's value."""

    def changelist_view(self, request: HttpRequest, extra_context: Any = None) -> Any:
        """The list. PostgreSQL cannot even compare with NUL."""
        if any("\0" in text for values in request.GET.lists() for text in (values[0], *values[1])):
            raise BadRequest("The query has a NUL.")
        return super().changelist_view(request, extra_context)

    def get_object(self, request: HttpRequest, object_id: str, from_field: str | None = None) -> Any:
        """The row of this id, or None."""
        return None if "\0" in object_id else super().get_object(request, object_id, from_field)

    def response_action(self, request: HttpRequest, queryset: Any) -> Any:
        """The answer of an action on the selected rows."""
        try:
            for selected in request.POST.getlist(ACTION_CHECKBOX_NAME):
                self.opts.pk.to_python(selected)
        except ValidationError as error:
            raise BadRequest("A selected row has no id of one.") from error
        return super().response_action(request, queryset)


class ReadOnlyAdmin(CheckedListAdmin):
    """A read-only page."""

    def has_add_permission(self, request: HttpRequest, obj: Model | None = None) -> bool:
        """Never."""
        return False

    def has_change_permission(self, request: HttpRequest, obj: Model | None = None) -> bool:
        """Never."""
        return False

    def has_delete_permission(self, request: HttpRequest, obj: Model | None = None) -> bool:
        """Never."""
        return False


class ServiceAdmin(CheckedListAdmin):
    """A page whose changes go through services, so that their rules and audit events apply."""

    def remove(self, obj: Any, actor: str) -> None:
        """Remove `obj` through its service; raises RegistryError."""
        raise RegistryError(f"{obj} cannot be removed")

    def confirmed(self, request: HttpRequest, question: str, change: Callable[[], object], done: str) -> HttpResponse:
        """The response of a row button. A button is a link: GET asks for confirmation, the POST of that form runs `change`."""
        back = reverse(f"admin:{self.opts.app_label}_{self.opts.model_name}_changelist")
        if request.method == "POST":
            run(request, change, done)
            return HttpResponseRedirect(back)
        context = {**self.admin_site.each_context(request), "opts": self.opts, "title": question, "question": question}
        return TemplateResponse(request, "admin/confirm_action.html", {**context, "back": back})

    def row(self, request: HttpRequest, object_id: str) -> Any:
        """The row that a button's address names. Raises Http404 if there is none, or if no row can have that name."""
        found = self.get_object(request, object_id)
        if found is None:
            raise Http404
        return found

    def changeform_view(
        self, request: HttpRequest, object_id: str | None = None, form_url: str = "", extra_context: Any = None
    ) -> Any:
        """The form. What the service refuses after the form's own checks, as another change came first, is a message."""
        try:
            return super().changeform_view(request, object_id, form_url, extra_context)
        except RegistryError as error:
            messages.error(request, str(error))
        except IntegrityError:  # another change took the name after the check
            messages.error(request, "Another change came first; look at what it did, and try again.")
        return HttpResponseRedirect(request.get_full_path())

    def delete_model(self, request: HttpRequest, obj: Any) -> None:
        """Remove one row."""
        run(request, lambda: self.remove(obj, actor(request)))

    def delete_queryset(self, request: HttpRequest, queryset: Any) -> None:
        """Remove the selected rows."""
        for obj in queryset:
            self.delete_model(request, obj)


def actor(request: HttpRequest) -> str:
    """The user's name for audit events."""
    return f"admin:{request.user.get_username()}"


def run(request: HttpRequest, change: Callable[[], object], done: str = "") -> bool:
    """Run a change and show its result as a message; returns whether it succeeded."""
    try:
        change()
    except RegistryError as error:
        messages.error(request, str(error))
        return False
    if done:
        messages.success(request, done)
    return True
