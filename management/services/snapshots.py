"""Builds the snapshot that the request path reads."""

from __future__ import annotations

from management.models import ApiKey, Deployment, Worker
from management.snapshot import ApiKeyEntry, DeploymentEntry, Snapshot, WorkerEntry


def build_snapshot() -> Snapshot:
    """Deployments with workers that can be connected to, and the keys that are good."""
    ready = Worker.objects.filter(state=Worker.State.READY).select_related("deployment").order_by("index", "-epoch")
    workers: dict[int, list[WorkerEntry]] = {}
    for worker in ready:
        entry = WorkerEntry(worker.worker_id, worker.epoch, worker.socket)
        workers.setdefault(worker.deployment_id, []).append(entry)
    rows = Deployment.objects.filter(replicas__gt=0).select_related("version__model").order_by("created_at")
    deployments = tuple(
        DeploymentEntry(
            name=row.name,
            model=row.version.model.name,
            version=row.version.number,
            source=row.version.source,
            created=int(row.created_at.timestamp()),
            is_default=row.is_default,
            workers=tuple(workers.get(row.pk, ())),
        )
        for row in rows
    )
    keys = {
        key.prefix: ApiKeyEntry(
            prefix=key.prefix,
            name=key.name,
            hashed_key=key.hashed_key,
            scopes=frozenset(key.scopes),
            expires=key.expiry_date.timestamp() if key.expiry_date else None,
        )
        for key in ApiKey.objects.filter(revoked=False)
    }
    return Snapshot(deployments, keys)
