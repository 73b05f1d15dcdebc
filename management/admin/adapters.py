"""Admin page of adapters and their versions."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from django import forms
from django.conf import settings
from django.contrib import admin
from unfold.admin import TabularInline
from unfold.decorators import action, display
from unfold.widgets import UnfoldAdminSelectWidget, UnfoldAdminTextInputWidget

from management import live
from management.admin.base import ServiceAdmin, actor
from management.models import Adapter, AdapterVersion, Deployment
from management.services import adapters
from management.services.errors import RegistryError

if TYPE_CHECKING:
    from django.http import HttpRequest, HttpResponse

    from management.adapter_store import StoredAdapter


class AdapterForm(forms.ModelForm):
    """The form of an adapter. Validation reads its files and copies them into the store."""

    source = forms.CharField(
        max_length=512,
        help_text="A directory with adapter_config.json and adapter_model.safetensors. Other content makes a new version.",
        widget=UnfoldAdminTextInputWidget,
    )
    stored: StoredAdapter

    class Meta:
        model = Adapter
        fields = ["name", "deployment", "preload", "pinned", "workers"]
        widgets = {"deployment": UnfoldAdminSelectWidget}

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if self.instance.pk is not None and "source" in self.fields:
            self.fields["source"].initial = self.instance.current.source
            self.fields["source"].required = False
            self.fields["source"].help_text += " Empty keeps the present version."
            self.initial.setdefault("source", "")

    def clean_name(self) -> str:
        """Refuse the name of a model."""
        name: str = self.cleaned_data["name"]
        try:
            adapters.refuse_taken(name)
        except RegistryError as error:
            raise forms.ValidationError(error.fields["name"]) from error
        return name

    def clean_source(self) -> str:
        """Refuse a directory without a valid adapter."""
        source: str = self.cleaned_data["source"]
        if source:
            try:
                self.stored = adapters.read_adapter(source, settings.ADAPTER_ROOTS)
            except RegistryError as error:
                raise forms.ValidationError(str(error)) from error
        return source


class AdapterVersionInline(TabularInline):
    """The versions of an adapter, read-only."""

    model = AdapterVersion
    fields = readonly_fields = ["number", "digest", "rank", "source", "is_current", "created_at"]
    extra = 0
    can_delete = False

    def has_add_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        """Versions are created by new content."""
        return False


@admin.register(Adapter)
class AdapterAdmin(ServiceAdmin):
    """Adapters."""

    form = AdapterForm
    list_display = [
        "name", "deployment", "rank", "short_digest", "preload", "pinned", "in_slots", "failure", "source",
        "created_at",
    ]  # fmt: skip
    list_select_related = ["deployment"]
    search_fields = ["name"]
    inlines = [AdapterVersionInline]
    actions_row = ["roll_back"]
    actions_detail = ["roll_back"]

    def get_queryset(self, request: HttpRequest) -> Any:
        """With the versions."""
        return super().get_queryset(request).prefetch_related("versions")

    def get_object(self, request: HttpRequest, object_id: str, from_field: str | None = None) -> Any:
        """The adapter, or None: also for one that was removed before its versions were read."""
        found = super().get_object(request, object_id, from_field)
        return found if found is not None and found.versions.all() else None

    def get_readonly_fields(self, request: HttpRequest, obj: Any = None) -> list[str]:
        """Name and deployment cannot be changed."""
        return ["name", "deployment"] if obj else []

    def formfield_for_foreignkey(self, db_field: Any, request: HttpRequest, **kwargs: Any) -> Any:
        """Deleted deployments get no adapters."""
        kwargs["queryset"] = Deployment.objects.filter(deleted=False)
        return super().formfield_for_foreignkey(db_field, request, **kwargs)

    @display(description="Rank")
    def rank(self, obj: Adapter) -> int:
        """The rank of the current version."""
        return obj.current.rank

    @display(description="Digest")
    def short_digest(self, obj: Adapter) -> str:
        """The first 12 hexadecimal digits of the current version's digest."""
        return obj.current.digest[:12]

    @display(description="Source")
    def source(self, obj: Adapter) -> str:
        """Number and source of the current version."""
        return f"{obj.current.number}: {obj.current.source}"

    @display(description="In slots of")
    def in_slots(self, obj: Adapter) -> str:
        """The workers that have the adapter in a slot, by their last heartbeats."""
        digest = obj.current.digest
        return ", ".join(sorted(worker for worker, stats in live.stats().items() if digest in stats.adapters))

    @display(description="Failure")
    def failure(self, obj: Adapter) -> str:
        """Why workers could not load it when it was last needed."""
        digest = obj.current.digest
        found = {
            w: stats.failed_adapters[digest] for w, stats in live.stats().items() if digest in stats.failed_adapters
        }
        return "; ".join(f"{worker}: {failure.words}" for worker, failure in sorted(found.items()))

    def save_model(self, request: HttpRequest, obj: Any, form: Any, change: bool) -> None:
        """Register or change through the services."""
        source, kept = (
            form.cleaned_data["source"],
            {name: getattr(obj, name) for name in ("preload", "pinned", "workers")},
        )
        if source:
            saved = adapters.register_adapter(
                obj.name, obj.deployment, source, actor(request), form.stored, replace=change, **kept
            )
            obj.pk, obj._state.adding = saved.pk, False
        else:
            adapters.change_adapter(obj, actor(request), **kept)

    def remove(self, obj: Adapter, actor: str) -> None:
        """Remove through the service."""
        adapters.remove_adapter(obj, actor)

    @action(description="Roll back", permissions=["change"], icon="undo")
    def roll_back(self, request: HttpRequest, object_id: str) -> HttpResponse:
        """Serve the version before the current one again."""
        adapter = self.row(request, object_id)
        return self.confirmed(
            request,
            f"Serve the version of {adapter.name} before {adapter.current.number} again?",
            lambda: adapters.roll_back(adapter, actor(request)),
            f"{adapter.name} is rolled back.",
        )
