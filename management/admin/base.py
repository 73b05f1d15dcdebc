"""Base classes of the registries' admin pages."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from django.contrib import messages
from django.contrib.admin.helpers import ACTION_CHECKBOX_NAME
from django.core.exceptions import BadRequest, ValidationError
from django.db import IntegrityError, transaction
from django.http import Http404, HttpResponseRedirect
from django.template.response import TemplateResponse
from django.urls import reverse
from django.utils.text import capfirst
from unfold.admin import ModelAdmin

from management.services.errors import RegistryError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from django.db.models import Model
    from django.http import HttpRequest, HttpResponse


class CheckedListAdmin(ModelAdmin):
    """A page whose list refuses (400) what can be neither a row's id nor a filter's value."""

    def changelist_view(self, request: HttpRequest, extra_context: Any = None) -> Any:
        """The list."""
        self.check_query(request)
        return super().changelist_view(request, extra_context)

    def check_query(self, request: HttpRequest) -> None:
        """Raise BadRequest for a NUL, with which PostgreSQL cannot even compare."""
        if any("\0" in text for values in request.GET.lists() for text in (values[0], *values[1])):
            raise BadRequest("The query has a NUL.")

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
        return self._told(request, partial(super().changeform_view, request, object_id, form_url, extra_context))

    def delete_view(self, request: HttpRequest, object_id: str, extra_context: Any = None) -> Any:
        """The deletion of one row. What the service refuses is a message."""
        return self._told(request, partial(super().delete_view, request, object_id, extra_context))

    def response_action(self, request: HttpRequest, queryset: Any) -> Any:
        """The answer of an action on the selected rows. If the service refuses one of them, all stay as they are."""
        return self._told(request, partial(transaction.atomic(super().response_action), request, queryset))

    def get_deleted_objects(
        self, objs: Iterable[Any], request: HttpRequest
    ) -> tuple[list[str], dict[str, int], set[str], list[str]]:
        """The rows alone, for the page that asks for confirmation. What goes with them, and whether they may go, is for the
        service to say: Django would follow the foreign keys, and ask for the right to delete rows that the service keeps.
        """
        rows, name = list(objs), str(self.opts.verbose_name)
        lacking = set() if all(self.has_delete_permission(request, row) for row in rows) else {name}
        count = {str(self.opts.verbose_name_plural): len(rows)}
        return [f"{capfirst(name)}: {row}" for row in rows], count, lacking, []

    def delete_model(self, request: HttpRequest, obj: Any) -> None:
        """Remove one row. Raises RegistryError."""
        self.remove(obj, actor(request))

    def delete_queryset(self, request: HttpRequest, queryset: Any) -> None:
        """Remove the selected rows. Raises RegistryError."""
        for obj in queryset:
            self.delete_model(request, obj)

    def _told(self, request: HttpRequest, view: Callable[[], Any]) -> Any:
        """The answer of a view that changes all or nothing. A refusal is a message on the page from which it was asked for."""
        try:
            return view()
        except RegistryError as error:
            messages.error(request, str(error))
        except IntegrityError:  # another change took the name after the check
            messages.error(request, "Another change came first; look at what it did, and try again.")
        return HttpResponseRedirect(request.get_full_path())


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
