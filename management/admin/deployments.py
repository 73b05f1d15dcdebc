"""Admin pages of deployments and workers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from django import forms
from django.contrib import admin
from django.urls import reverse
from django.utils.html import format_html_join
from unfold.decorators import action, display

from management import chat_template, live
from management.admin import engine_options
from management.admin.base import ReadOnlyAdmin, ServiceAdmin, actor
from management.admin.engine_options import EngineOptionsForm
from management.admin.fields import NamesField, ProvidersField
from management.models import Deployment, ModelVersion, Worker
from management.services import deployments
from management.services.discovery import register_beside
from management.services.errors import RegistryError

if TYPE_CHECKING:
    from django.http import HttpRequest, HttpResponse

LABELS = {
    "Active": "success",
    "Ready": "success",
    "Provisioning": "info",
    "Starting": "info",
    "Loading": "info",
    "Deleting": "warning",
    "Draining": "warning",
    "Failed": "danger",
}
SCALING = [
    "min_workers", "max_workers", "prefill_workers", "strategy", "upper_threshold", "lower_threshold", "up_window_s", "down_window_s",
    "scale_to_zero", "idle_timeout_s", "start_timeout_s", "drain_timeout_s", "fast_autoscaling",
    "share_while_starting", "immediate_scale_down", "max_price_per_hour", "min_throughput_rate",
]  # fmt: skip
PLACEMENT = [
    "gpu_type", "gpus_per_worker", "use_other_gpus", "expand_gpu_types", "spot", "cloud_providers", "instance_types",
    "use_on_prem", "on_prem_node_ids", "use_cloudburst",
]  # fmt: skip


class DeploymentForm(EngineOptionsForm):
    """The form of a deployment. The engine's configuration class validates its options together."""

    initial: dict[str, Any]

    class Meta:
        model = Deployment
        fields = ["name", "version", "inference_kind", "chat_template", *SCALING, *PLACEMENT]
        field_classes = {
            "cloud_providers": ProvidersField,
            "instance_types": NamesField,
            "on_prem_node_ids": NamesField,
        }

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        for name, value in self.instance.engine_options.items():
            self.initial.setdefault(name, value)
        for name in (*SCALING, *PLACEMENT, "inference_kind"):
            if name in self.fields:  # an empty field means the default
                self.fields[name].required = False

    def clean_name(self) -> str:
        """Refuse reserved names."""
        name: str = self.cleaned_data["name"]
        if name in deployments.RESERVED_NAMES:
            raise forms.ValidationError(f"{name} always means the default deployment.")
        return name

    def clean_chat_template(self) -> str:
        """Refuse one that cannot be used."""
        template = with_plain_line_ends(self.cleaned_data["chat_template"])
        changed = template != with_plain_line_ends(self.initial.get("chat_template", ""))
        if changed and (wrong := chat_template.problem(template)):
            raise forms.ValidationError(f"This is no template that can be used: {wrong}.")
        return template

    def clean(self) -> dict[str, Any]:
        """Refuse options that an engine would not accept in combination."""
        cleaned: dict[str, Any] = super().clean()
        for name in (*SCALING, *PLACEMENT, "inference_kind"):
            if name in self.fields and name not in self.errors and cleaned.get(name) in (None, ""):
                cleaned[name] = Deployment._meta.get_field(name).get_default()
        try:
            self.instance.engine_options = deployments.check_engine_options(engine_options.chosen(cleaned))
        except RegistryError as error:
            raise forms.ValidationError(str(error)) from error
        return cleaned


def with_plain_line_ends(text: str) -> str:
    """Browsers send two characters for each."""
    return text.replace("\r\n", "\n")


@admin.register(Deployment)
class DeploymentAdmin(ServiceAdmin):
    """Deployments with their live state and buttons to start and stop them."""

    form = DeploymentForm
    list_display = [
        "name",
        "version",
        "shown_state",
        "shown_reason",
        "workers_now",
        "load",
        "cost_so_far",
        "is_default",
    ]
    list_select_related = ["version__model"]
    list_before_template = "admin/live_status.html"
    readonly_fields = [
        "adapters", "state", "reason", "target_workers", "scale_blocked", "price_per_hour", "cost", "public_id",
        "owner",
    ]  # fmt: skip
    actions_row = ["start", "scale_up", "stop", "make_default"]
    actions_detail = ["start", "scale_up", "stop", "make_default"]

    @display(description="State", label=LABELS)
    def shown_state(self, obj: Deployment) -> str:
        """The state as a coloured label."""
        return Deployment.State(obj.current_state).label

    @display(description="Reason")
    def shown_reason(self, obj: Deployment) -> str:
        """Why it failed, what it waits for, or the limit that keeps it from growing."""
        return obj.reason or (f"blocked by {obj.scale_blocked}" if obj.scale_blocked else "")

    @display(description="Workers")
    def workers_now(self, obj: Deployment) -> str:
        """The wanted number within its limits."""
        limits = f"{obj.min_workers} to {obj.max_workers}" + (", may sleep" if obj.scale_to_zero else "")
        return f"{obj.target_workers} ({limits})"

    @display(description="Cost")
    def cost_so_far(self, obj: Deployment) -> str:
        """USD so far, and per hour now."""
        return f"${obj.cost:.2f} (${obj.price_per_hour:g}/h)" if obj.cost or obj.price_per_hour else ""

    @display(description="Adapters")
    def adapters(self, obj: Deployment) -> str:
        """Links to its adapters' pages."""
        rows = [(reverse("admin:management_adapter_change", args=[row.pk]), row.name) for row in obj.adapters.all()]
        return format_html_join(", ", '<a href="{}" class="text-primary-600">{}</a>', rows)

    @display(description="Load")
    def load(self, obj: Deployment) -> str:
        """Running and waiting requests in the deployment's engines."""
        mine = [s for worker, s in live.stats().items() if worker.rpartition("/")[0] == obj.name]
        if not mine:
            return ""
        return f"{sum(s.running for s in mine)} running, {sum(s.waiting for s in mine)} waiting"

    def changeform_view(
        self, request: HttpRequest, object_id: str | None = None, form_url: str = "", extra_context: Any = None
    ) -> Any:
        """Try a chat template before the page's transaction begins; the form asks again, and gets the same answer."""
        template = with_plain_line_ends(request.POST.get("chat_template", ""))
        if len(template) <= (Deployment._meta.get_field("chat_template").max_length or 0):
            chat_template.problem(template)
        return super().changeform_view(request, object_id, form_url, extra_context)

    def get_fieldsets(self, request: HttpRequest, obj: Any = None) -> Any:
        """The fields by purpose; read-only users see the engine options as they are stored."""
        main = ["name", "version", "inference_kind", "chat_template", *self.readonly_fields]
        may_change = obj is None or self.has_change_permission(request, obj)
        return [
            (None, {"fields": main}),
            ("Scaling", {"fields": SCALING}),
            ("Placement", {"fields": PLACEMENT, "classes": ["collapse"]}),
            ("Engine options", {"fields": list(engine_options.FIELDS) if may_change else ["engine_options"]}),
        ]

    def get_queryset(self, request: HttpRequest) -> Any:
        """Without the records of deleted deployments."""
        return super().get_queryset(request).exclude(state=Deployment.State.DELETED)

    def formfield_for_foreignkey(self, db_field: Any, request: HttpRequest, **kwargs: Any) -> Any:
        """The choices of a version, whose names need the model's."""
        if db_field.name == "version":
            kwargs["queryset"] = ModelVersion.objects.select_related("model")
        return super().formfield_for_foreignkey(db_field, request, **kwargs)

    def get_readonly_fields(self, request: HttpRequest, obj: Any = None) -> list[str]:
        """Name and kind cannot be changed."""
        return [*self.readonly_fields, "name", "inference_kind"] if obj else self.readonly_fields

    def save_model(self, request: HttpRequest, obj: Any, form: Any, change: bool) -> None:
        """Create or change through the services."""
        fields = {name: form.cleaned_data[name] for name in (*SCALING, *PLACEMENT, "chat_template")}
        if change:
            deployments.change_deployment(
                obj, actor(request), version=obj.version, engine_options=obj.engine_options, **fields
            )
            return
        saved = deployments.create_deployment(
            obj.name,
            obj.version,
            actor(request),
            obj.engine_options,
            inference_kind=obj.inference_kind,
            **fields,
        )
        register_beside(saved, actor(request))
        obj.pk, obj._state.adding = saved.pk, False

    def remove(self, obj: Deployment, actor: str) -> None:
        """Remove through the service."""
        deployments.delete_deployment(obj, actor)

    def has_operate_permission(self, request: HttpRequest, object_id: Any = None) -> bool:
        """Whether the user may start and stop deployments."""
        return request.user.has_perm("management.operate_deployment")

    @action(description="Start", permissions=["operate"], icon="play_arrow")
    def start(self, request: HttpRequest, object_id: str) -> HttpResponse:
        """Start the deployment with its minimum of workers, at least one."""
        return self._operate(request, object_id, "Start", deployments.start_deployment, "is starting")

    @action(description="Add worker", permissions=["operate"], icon="add")
    def scale_up(self, request: HttpRequest, object_id: str) -> HttpResponse:
        """Ask for one worker more, or wake the deployment."""
        return self._operate(request, object_id, "Add a worker to", deployments.scale_up, "is growing")

    @action(description="Stop", permissions=["operate"], icon="stop")
    def stop(self, request: HttpRequest, object_id: str) -> HttpResponse:
        """Stop the deployment; running requests finish first."""
        return self._operate(request, object_id, "Stop", deployments.stop_deployment, "is stopping")

    @action(description="Make default", permissions=["operate"], icon="star")
    def make_default(self, request: HttpRequest, object_id: str) -> HttpResponse:
        """Make the deployment the default for requests without a model name."""
        return self._operate(request, object_id, "Make default:", deployments.make_default, "is the default now")

    def _operate(self, request: HttpRequest, object_id: str, verb: str, service: Any, done: str) -> HttpResponse:
        deployment = self.row(request, object_id)
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
