"""Renders deployments as the vendor's objects."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING, Any

from django.conf import settings
from django.db.models import Count, Exists, OuterRef, Q, Subquery
from django.db.models.functions import Coalesce, Now
from django.utils import timezone

from management import live
from management.api.scalegenai.canonical import canonical
from management.api.scalegenai.secrecy import HIDDEN
from management.models import AdapterVersion, AuditEvent, Deployment, Model, Secret, Worker
from management.overview import SCALING, decision_of
from management.services.secrets import HUB_TOKEN

if TYPE_CHECKING:
    from collections.abc import Iterable
    from datetime import datetime

    from django.db.models import QuerySet

TIME_FORMAT = "%Y-%m-%d %H:%M:%S.%f"
"""The vendor's, in UTC."""
SHOWN_AFTER_END = timedelta(hours=24)
COLUMNS = (
    "title", "inference_kind", "chat_template", "min_workers", "max_workers", "strategy", "upper_threshold",
    "lower_threshold", "up_window_s", "down_window_s", "start_timeout_s", "drain_timeout_s", "scale_to_zero",
    "idle_timeout_s", "fast_autoscaling", "share_while_starting", "max_price_per_hour", "min_throughput_rate", "gpu_type",
    "gpus_per_worker", "use_other_gpus", "expand_gpu_types", "spot", "cloud_providers", "instance_types", "use_on_prem",
    "on_prem_node_ids", "use_cloudburst",
)  # fmt: skip
"""The columns that the normaliser writes."""


def shown_deployments() -> QuerySet[Deployment]:
    """All deployments with what their answers need."""
    # Names are used again: an event is of this deployment if it happened in its lifetime.
    decisions = AuditEvent.objects.filter(
        target=OuterRef("name"),
        action__startswith=SCALING,
        at__gte=OuterRef("created_at"),
        at__lte=OuterRef("until"),
    )
    rows = Deployment.objects.select_related("version__model").prefetch_related("adapters__versions")
    return rows.annotate(
        until=Coalesce("ended_at", Now()),
        decision=Subquery(decisions.order_by("-pk").values("pk")[:1]),
        has_token=Exists(Secret.objects.filter(deployment=OuterRef("pk"), name=HUB_TOKEN)),
        ready=Count("workers", filter=Q(workers__state=Worker.State.READY, workers__spare=False), distinct=True),
        starting=Count(
            "workers", filter=Q(workers__state__in=(Worker.State.STARTING, Worker.State.LOADING)), distinct=True
        ),
    )


def listed_deployments() -> QuerySet[Deployment]:
    """The same without those that were deleted long ago."""
    long_ago = timezone.now() - SHOWN_AFTER_END
    return shown_deployments().exclude(state=Deployment.State.DELETED, ended_at__lt=long_ago).order_by("created_at")


def body_of(row: Deployment) -> dict[str, Any]:
    """The body that would create the deployment as it is."""
    body = canonical({name: getattr(row, name) for name in COLUMNS}, row.vendor_fields)
    body["name"] = row.title or row.name
    body["model"] = body["model"] or row.version.model.name
    return body


def answers_of(rows: Iterable[Deployment]) -> list[dict[str, Any]]:
    """The vendor's objects of rows of `shown_deployments`."""
    rows = list(rows)
    events = AuditEvent.objects.in_bulk([row.decision for row in rows if row.decision is not None])
    return [_answer(row, events.get(row.decision)) for row in rows]


def _answer(row: Deployment, decision: AuditEvent | None) -> dict[str, Any]:
    body = body_of(row)
    body["llm_loras"] = _adapters(row, {each["name"]: each for each in body["llm_loras"]})
    if row.has_token:
        body["hf_token"] = HIDDEN
    return {
        "id": row.public_id,
        "user_id": row.owner,
        **body,
        "status": row.current_state.upper(),
        "current_price_per_hour": row.price_per_hour,
        "cost": row.cost,
        "last_cost_updated_time": _time(row.cost_updated_at),
        "timestamp": _time(row.created_at),
        "link": link_of(row),
        "end_time": _time(row.ended_at),
        "metadata": {
            "deployment": row.name,
            "last_error": row.reason or None,
            "last_decision": decision and {"at": _time(decision.at), **decision_of(decision)},
            "scale_blocked": row.scale_blocked or None,
            "target_workers": row.target_workers,
            "ready_workers": row.ready,
            "starting_workers": row.starting,
            "warnings": row.vendor_fields.get("warnings", []),
            "extra": row.vendor_fields.get("extra", {}),
        },
    }


def _adapters(row: Deployment, given: dict[str, dict[str, Any]]) -> list[dict[str, Any]]:
    """The adapters that the deployment serves, whoever registered them: as they were `given`, or with their source. `error` says
    why a worker could not load one. A deleted deployment has none, and is shown as it was given.
    """
    if row.deleted:
        return list(given.values())
    found = []
    for name, current in _served(row).items():
        shown = given.get(name, {"name": name, "hf_repo": current.source, "hf_token": None})
        failure = live.adapter_failure(current.digest)
        found.append(shown if failure is None else {**shown, "error": failure.words})
    return found


def served_sources(row: Deployment) -> dict[str, str]:
    """The sources of the adapters that the deployment serves, whoever registered them, by name."""
    return {name: current.source for name, current in _served(row).items()}


def _served(row: Deployment) -> dict[str, AdapterVersion]:
    """The current versions of the adapters that the deployment serves, oldest first, by name."""
    # One without versions was removed after its row was read.
    kept = (each for each in sorted(row.adapters.all(), key=lambda each: each.pk) if each.versions.all())
    return {each.name: each.current for each in kept}


def link_of(row: Deployment) -> str:
    """The deployment's address. Clients append `/inference`, and to an embedding's `inference/embed`."""
    link = f"{settings.FRONT_URL}/deployments/{row.public_id}"
    return f"{link}/" if row.inference_kind == Model.Kind.EMBEDDING else link


def _time(moment: datetime | None) -> str | None:
    return None if moment is None else moment.strftime(TIME_FORMAT)
