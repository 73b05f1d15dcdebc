"""Builds the snapshot that the request path reads."""

from __future__ import annotations

from management.models import Adapter, ApiKey, Deployment, Worker
from management.snapshot import AdapterEntry, ApiKeyEntry, DeploymentEntry, Snapshot, WorkerEntry


def build_snapshot() -> Snapshot:
    """Deployments with workers that can be connected to, their models' adapters, and the keys that are good."""
    ready = Worker.objects.filter(state=Worker.State.READY).select_related("deployment", "version__model")
    serving: dict[int, list[Worker]] = {}
    for worker in ready.order_by("index", "-epoch"):
        serving.setdefault(worker.deployment_id, []).append(worker)
    adapters: dict[int, list[AdapterEntry]] = {}
    for adapter in Adapter.objects.order_by("name"):
        entry = AdapterEntry(
            name=adapter.name,
            digest=adapter.digest,
            directory=adapter.source,
            created=int(adapter.created_at.timestamp()),
            preload=adapter.preload,
            pinned=adapter.pinned,
        )
        adapters.setdefault(adapter.model_id, []).append(entry)
    deployments = []
    for row in Deployment.objects.filter(replicas__gt=0).select_related("version__model").order_by("created_at"):
        workers = serving.get(row.pk, [])
        # What runs is what is told, not what is wished for.
        version = max(workers, key=lambda w: w.pk).version if workers else row.version
        deployments.append(
            DeploymentEntry(
                name=row.name,
                model=version.model.name,
                version=version.number,
                created=int(row.created_at.timestamp()),
                is_default=row.is_default,
                workers=tuple(WorkerEntry(w.worker_id, w.epoch, w.socket) for w in workers if w.version == version),
                adapters=tuple(adapters.get(version.model_id, ())),
            )
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
    return Snapshot(tuple(deployments), keys)
