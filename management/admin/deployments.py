"""Deployments and workers: state, and the buttons that start and stop."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from django import forms
from django.contrib import admin
from django.shortcuts import get_object_or_404
from unfold.decorators import action, display

from management import live
from management.admin import engine_options
from management.admin.base import ReadOnlyAdmin, ServiceAdmin, actor
from management.admin.engine_options import EngineOptionsForm
from management.models import Deployment, Worker
from management.services import deployments
from management.services.errors import RegistryError

if TYPE_CHECKING:
    from django.http import HttpRequest, HttpResponse

LABELS = {
    "Ready": "success",
    "Starting": "info",
    "Loading": "info",
    "Stopping": "warning",
    "Draining": "warning",
    "Failed": "danger",
}


class DeploymentForm(EngineOptionsForm):
    """Together, the engine options are checked by the engine's own configuration."""

    initial: dict[str, Any]

    class Meta:
        model = Deployment
        fields = ["name", "version"]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        for name, value in self.instance.engine_options.items():
            self.initial.setdefault(name, value)

    def clean_name(self) -> str:
        """Refuse reserved names at their field."""
        name: str = self.cleaned_data["name"]
        if name in deployments.RESERVED_NAMES:
            raise forms.ValidationError(f"{name} always means the default deployment.")
        return name

    def clean(self) -> dict[str, Any]:
        """Refuse options that an engine would not accept beside each other."""
        cleaned: dict[str, Any] = super().clean()
        try:
            self.instance.engine_options = deployments.check_engine_options(engine_options.chosen(cleaned))
        except RegistryError as error:
            raise forms.ValidationError(str(error)) from error
        return cleaned


@admin.register(Deployment)
class DeploymentAdmin(ServiceAdmin):
    """Deployments with their live state."""

    form = DeploymentForm
    list_display = ["name", "version", "shown_state", "reason", "replicas", "load", "is_default"]
    list_select_related = ["version__model"]
    list_before_template = "admin/live_status.html"
    readonly_fields = ["state", "reason", "replicas"]
    actions_row = ["start", "stop", "make_default"]
    actions_detail = ["start", "stop", "make_default"]

    @display(description="State", label=LABELS)
    def shown_state(self, obj: Deployment) -> str:
        """With a colour."""
        return obj.get_state_display()

    @display(description="Load")
    def load(self, obj: Deployment) -> str:
        """Requests inside the engines of this deployment."""
        mine = [s for worker, s in live.stats().items() if worker.rpartition("/")[0] == obj.name]
        if not mine:
            return ""
        return f"{sum(s.running for s in mine)} running, {sum(s.waiting for s in mine)} waiting"

    def get_fieldsets(self, request: HttpRequest, obj: Any = None) -> Any:
        """Options apart from the rest; who may only look sees them as they are stored."""
        if obj is not None and not self.has_change_permission(request, obj):
            return [(None, {"fields": ["name", "version", *self.readonly_fields, "engine_options"]})]
        return [
            (None, {"fields": ["name", "version", *self.readonly_fields]}),
            ("Engine options", {"fields": list(engine_options.FIELDS)}),
        ]

    def get_readonly_fields(self, request: HttpRequest, obj: Any = None) -> list[str]:
        """A name is for ever."""
        return [*self.readonly_fields, "name"] if obj else self.readonly_fields

    def save_model(self, request: HttpRequest, obj: Any, form: Any, change: bool) -> None:
        """Through the services."""
        if change:
            deployments.change_deployment(obj, obj.version, obj.engine_options, actor(request))
            return
        saved = deployments.create_deployment(obj.name, obj.version, actor(request), obj.engine_options)
        obj.pk, obj._state.adding = saved.pk, False

    def remove(self, obj: Deployment, actor: str) -> None:
        """Through the service."""
        deployments.remove_deployment(obj, actor)

    def has_operate_permission(self, request: HttpRequest, object_id: Any = None) -> bool:
        """Starting and stopping has a permission of its own."""
        return request.user.has_perm("management.operate_deployment")

    @action(description="Start", permissions=["operate"], icon="play_arrow")
    def start(self, request: HttpRequest, object_id: int) -> HttpResponse:
        """One worker."""
        return self._operate(request, object_id, "Start", deployments.start_deployment, "is starting")

    @action(description="Stop", permissions=["operate"], icon="stop")
    def stop(self, request: HttpRequest, object_id: int) -> HttpResponse:
        """Running requests are finished first."""
        return self._operate(request, object_id, "Stop", deployments.stop_deployment, "is stopping")

    @action(description="Make default", permissions=["operate"], icon="star")
    def make_default(self, request: HttpRequest, object_id: int) -> HttpResponse:
        """For requests that name no model."""
        return self._operate(request, object_id, "Make default:", deployments.make_default, "is the default now")

    def _operate(self, request: HttpRequest, object_id: int, verb: str, service: Any, done: str) -> HttpResponse:
        deployment = get_object_or_404(Deployment, pk=object_id)
        name = deployment.name
        return self.confirmed(
            request, f"{verb} {name}?", lambda: service(deployment, actor(request)), f"{name} {done}."
        )


@admin.register(Worker)
class WorkerAdmin(ReadOnlyAdmin):
    """Engine processes, past and present."""

    list_display = ["worker_id", "epoch", "shown_state", "reason", "process_id", "started_at", "ready_at", "ended_at"]
    list_filter = ["state"]
    list_select_related = ["deployment"]
    list_before_template = "admin/live_status.html"

    @display(description="State", label=LABELS)
    def shown_state(self, obj: Worker) -> str:
        """With a colour."""
        return obj.get_state_display()
