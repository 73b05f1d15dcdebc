"""Admin pages of models and adapters."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from django import forms
from django.contrib import admin
from unfold.admin import TabularInline
from unfold.widgets import UnfoldAdminSelectWidget, UnfoldAdminTextInputWidget

from management import live
from management.admin.base import ServiceAdmin, actor
from management.models import Adapter, Model, ModelVersion
from management.services import adapters, models
from management.services.errors import RegistryError

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
        version = obj.versions.filter(is_default=True).first()
        return "" if version is None else f"{version.number}: {version.source}"

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


class AdapterForm(forms.ModelForm):
    """The form of an adapter. Validation reads and hashes the adapter's files."""

    class Meta:
        model = Adapter
        fields = ["name", "model", "source", "preload", "pinned"]
        widgets = {"model": UnfoldAdminSelectWidget}

    def clean(self) -> dict[str, object] | None:
        """Refuse a name that an adapter of another model has."""
        cleaned = super().clean()
        model = self.cleaned_data.get("model")
        known = Adapter.objects.filter(name=self.cleaned_data.get("name")).first()
        if known is not None and model is not None and known.model_id != model.pk:
            raise forms.ValidationError({"name": f"This is an adapter of {known.model.name}."})
        return cleaned

    def clean_source(self) -> str:
        """Refuse a directory without a valid adapter."""
        source: str = self.cleaned_data["source"]
        try:
            adapters.read_identity(Path(source))
        except RegistryError as error:
            raise forms.ValidationError(str(error)) from error
        return source


@admin.register(Adapter)
class AdapterAdmin(ServiceAdmin):
    """Adapters."""

    form = AdapterForm
    list_display = ["name", "model", "rank", "short_digest", "preload", "pinned", "in_slots", "source", "created_at"]
    list_select_related = ["model"]
    readonly_fields = ["rank", "digest"]
    search_fields = ["name"]

    @admin.display(description="Digest")
    def short_digest(self, obj: Adapter) -> str:
        """The first 12 hexadecimal digits of the digest."""
        return obj.digest[:12]

    @admin.display(description="In slots of")
    def in_slots(self, obj: Adapter) -> str:
        """The workers that have the adapter in a slot, by their last heartbeats."""
        return ", ".join(sorted(worker for worker, stats in live.stats().items() if obj.digest in stats.adapters))

    def save_model(self, request: HttpRequest, obj: Any, form: Any, change: bool) -> None:
        """Register through the service."""
        saved = adapters.register_adapter(
            obj.name, obj.model, obj.source, actor(request), preload=obj.preload, pinned=obj.pinned
        )
        obj.pk, obj._state.adding = saved.pk, False

    def remove(self, obj: Adapter, actor: str) -> None:
        """Remove through the service."""
        adapters.remove_adapter(obj, actor)
