"""What the server does at the moment, read from the database: for `status` and for scripts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from management.leadership import current_leader
from management.models import AuditEvent, Deployment, Worker
from management.stored_loads import StoredLoads

if TYPE_CHECKING:
    from collections.abc import Iterable

    from management.load import DeploymentLoad

DECISIONS = 5
SCALING = "deployment.scaling."


def overview() -> dict[str, Any]:
    """Deployments with their workers, load and last scaling decisions, as JSON values. Raises `django.db.Error`."""
    stored = StoredLoads()
    stored.read()
    loads: dict[str, list[DeploymentLoad]] = {}
    for report in stored.reports():
        for public_id, load in report.deployments.items():
            loads.setdefault(public_id, []).append(load)
    rows = Deployment.objects.exclude(state=Deployment.State.DELETED).select_related("version__model")
    return {
        "deployments": [_deployment(row, loads.get(row.public_id, [])) for row in rows],
        "leader": current_leader(),
        "web_processes": sorted(report.process for report in stored.reports()),
    }


def shortcomings(found: dict[str, Any]) -> list[str]:
    """What of an overview is not as it was asked for: no leader, no web process, a deployment without enough workers."""
    wrong = [] if found["leader"] else ["no reconciler leads"]
    wrong += [] if found["web_processes"] else ["no web process reports"]
    for row in found["deployments"]:
        ready = sum(worker["state"] == str(Worker.State.READY) for worker in row["workers"])
        if row["state"] == str(Deployment.State.FAILED):
            wrong.append(f"{row['name']} failed: {row['reason']}")
        elif ready < row["workers_wanted"]:
            wrong.append(f"{row['name']}: {ready} of {row['workers_wanted']} workers are ready")
    return wrong


def decision_of(event: AuditEvent) -> dict[str, Any]:
    """The rule of a scaling decision, what it knew, and what it did."""
    return {"rule": event.action.removeprefix(SCALING), **event.details}


def _deployment(row: Deployment, loads: Iterable[DeploymentLoad]) -> dict[str, Any]:
    gauges = [load.gauges for load in loads]
    running: dict[str, int] = {}
    for load in loads:
        for worker, count in load.running.items():
            running[worker] = running.get(worker, 0) + count
    events = AuditEvent.objects.filter(target=row.name, action__startswith=SCALING)[:DECISIONS]
    return {
        "name": row.name,
        "id": row.public_id,
        "model": str(row.version),
        "state": row.current_state,
        "reason": row.reason,
        "workers_wanted": row.target_workers,
        "min_workers": row.min_workers,
        "max_workers": row.max_workers,
        "scale_to_zero": row.scale_to_zero,
        "scale_blocked": row.scale_blocked,
        "running": sum(gauge.running for gauge in gauges),
        "waiting": sum(gauge.waiting for gauge in gauges),
        "held": sum(gauge.held for gauge in gauges),
        "price_per_hour": row.price_per_hour,
        "cost": round(row.cost, 6),
        "workers": [
            {
                "worker": worker.worker_id,
                "epoch": worker.epoch,
                "role": row.role_of(worker.index),
                "state": worker.state,
                "doing": worker.reason,
                "process_id": worker.process_id,
                "running": running.get(worker.worker_id, 0),
            }
            for worker in row.workers.filter(state__in=Worker.LIVE).order_by("index", "epoch")
        ],
        "decisions": [{"at": event.at.isoformat(), **decision_of(event)} for event in events],
    }
