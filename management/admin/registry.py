"""Admin page of models."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from django import forms
from django.contrib import admin
from unfold.admin import TabularInline
from unfold.widgets import UnfoldAdminTextInputWidget

from management.admin.base import ServiceAdmin, actor
from management.models import Model, ModelVersion
from management.services import models

if TYPE_CHECKING:
    from django.http import HttpRequest


class ModelForm(forms.ModelForm):
    """The form of a model. A new source makes a new version."""

    source = forms.CharField(max_length=512, help_text="A directory on the worker's host, or a hub id.",
                             widget=UnfoldAdminTextInputWidget)  # fmt: skip

    class Meta:
        model = Model
        fields = ["name", "kind"]


class VersionInline(TabularInline):
    """The versions of a model, read-only."""

    model = ModelVersion
    fields = readonly_fields = ["number", "source", "is_default", "created_at"]
    extra = 0
    can_delete = False

    def has_add_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        """Versions are created by a new source."""
        return False


@admin.register(Model)
class ModelAdmin(ServiceAdmin):
    """Models."""

    form = ModelForm
    list_display = ["name", "kind", "default_source", "created_at"]
    search_fields = ["name"]
    inlines = [VersionInline]

    @admin.display(description="Default version")
    def default_source(self, obj: Model) -> str:
        """Number and source of the default version."""
        default = next((version for version in obj.versions.all() if version.is_default), None)
        return "" if default is None else f"{default.number}: {default.source}"

    def get_queryset(self, request: HttpRequest) -> Any:
        """With the versions."""
        return super().get_queryset(request).prefetch_related("versions")

    def get_readonly_fields(self, request: HttpRequest, obj: Any = None) -> list[str]:
        """Name and kind cannot be changed."""
        return ["name", "kind"] if obj else []

    def save_model(self, request: HttpRequest, obj: Any, form: Any, change: bool) -> None:
        """Register the source through the service."""
        name = obj.name
        version = models.register_model(name, form.cleaned_data["source"], actor(request), obj.kind)
        obj.pk, obj._state.adding = version.model_id, False

    def remove(self, obj: Model, actor: str) -> None:
        """Remove through the service."""
        models.remove_model(obj, actor)
