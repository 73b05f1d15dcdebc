"""Admin pages of deployments and workers."""

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
    """The form of a deployment. The engine's configuration class validates its options together."""

    initial: dict[str, Any]

    class Meta:
        model = Deployment
        fields = ["name", "version"]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        for name, value in self.instance.engine_options.items():
            self.initial.setdefault(name, value)

    def clean_name(self) -> str:
        """Refuse reserved names."""
        name: str = self.cleaned_data["name"]
        if name in deployments.RESERVED_NAMES:
            raise forms.ValidationError(f"{name} always means the default deployment.")
        return name

    def clean(self) -> dict[str, Any]:
        """Refuse options that an engine would not accept in combination."""
        cleaned: dict[str, Any] = super().clean()
        try:
            self.instance.engine_options = deployments.check_engine_options(engine_options.chosen(cleaned))
        except RegistryError as error:
            raise forms.ValidationError(str(error)) from error
        return cleaned


@admin.register(Deployment)
class DeploymentAdmin(ServiceAdmin):
    """Deployments with their live state and buttons to start and stop them."""

    form = DeploymentForm
    list_display = ["name", "version", "shown_state", "reason", "replicas", "load", "is_default"]
    list_select_related = ["version__model"]
    list_before_template = "admin/live_status.html"
    readonly_fields = ["state", "reason", "replicas"]
    actions_row = ["start", "stop", "make_default"]
    actions_detail = ["start", "stop", "make_default"]

    @display(description="State", label=LABELS)
    def shown_state(self, obj: Deployment) -> str:
        """The state as a coloured label."""
        return obj.get_state_display()

    @display(description="Load")
    def load(self, obj: Deployment) -> str:
        """Running and waiting requests in the deployment's engines."""
        mine = [s for worker, s in live.stats().items() if worker.rpartition("/")[0] == obj.name]
        if not mine:
            return ""
        return f"{sum(s.running for s in mine)} running, {sum(s.waiting for s in mine)} waiting"

    def get_fieldsets(self, request: HttpRequest, obj: Any = None) -> Any:
        """Engine options in a section of their own; read-only users see them as stored JSON."""
        if obj is not None and not self.has_change_permission(request, obj):
            return [(None, {"fields": ["name", "version", *self.readonly_fields, "engine_options"]})]
        return [
            (None, {"fields": ["name", "version", *self.readonly_fields]}),
            ("Engine options", {"fields": list(engine_options.FIELDS)}),
        ]

    def get_readonly_fields(self, request: HttpRequest, obj: Any = None) -> list[str]:
        """Names cannot be changed."""
        return [*self.readonly_fields, "name"] if obj else self.readonly_fields

    def save_model(self, request: HttpRequest, obj: Any, form: Any, change: bool) -> None:
        """Create or change through the services."""
        if change:
            deployments.change_deployment(obj, obj.version, obj.engine_options, actor(request))
            return
        saved = deployments.create_deployment(obj.name, obj.version, actor(request), obj.engine_options)
        obj.pk, obj._state.adding = saved.pk, False

    def remove(self, obj: Deployment, actor: str) -> None:
        """Remove through the service."""
        deployments.delete_deployment(obj, actor)

    def has_operate_permission(self, request: HttpRequest, object_id: Any = None) -> bool:
        """Whether the user may start and stop deployments."""
        return request.user.has_perm("management.operate_deployment")

    @action(description="Start", permissions=["operate"], icon="play_arrow")
    def start(self, request: HttpRequest, object_id: int) -> HttpResponse:
        """Start the deployment with one worker."""
        return self._operate(request, object_id, "Start", deployments.start_deployment, "is starting")

    @action(description="Stop", permissions=["operate"], icon="stop")
    def stop(self, request: HttpRequest, object_id: int) -> HttpResponse:
        """Stop the deployment; running requests finish first."""
        return self._operate(request, object_id, "Stop", deployments.stop_deployment, "is stopping")

    @action(description="Make default", permissions=["operate"], icon="star")
    def make_default(self, request: HttpRequest, object_id: int) -> HttpResponse:
        """Make the deployment the default for requests without a model name."""
        return self._operate(request, object_id, "Make default:", deployments.make_default, "is the default now")

    def _operate(self, request: HttpRequest, object_id: int, verb: str, service: Any, done: str) -> HttpResponse:
        deployment = get_object_or_404(Deployment, pk=object_id)
        name = deployment.name
        return self.confirmed(
            request, f"{verb} {name}?", lambda: service(deployment, actor(request)), f"{name} {done}."
        )


@admin.register(Worker)
class WorkerAdmin(ReadOnlyAdmin):
    """Workers, running and ended ones."""

    list_display = ["worker_id", "epoch", "shown_state", "reason", "process_id", "started_at", "ready_at", "ended_at"]
    list_filter = ["state"]
    list_select_related = ["deployment"]
    list_before_template = "admin/live_status.html"

    @display(description="State", label=LABELS)
    def shown_state(self, obj: Worker) -> str:
        """The state as a coloured label."""
        return obj.get_state_display()
