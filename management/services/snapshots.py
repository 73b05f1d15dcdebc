"""Reads the registries from the database, and builds the snapshot from them and the ready workers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from management.models import Adapter, ApiKey, Deployment
from management.snapshot import AdapterEntry, ApiKeyEntry, DeploymentEntry, Snapshot, WorkerEntry

if TYPE_CHECKING:
    from collections.abc import Iterable

    from management.models import Worker


@dataclass(frozen=True, slots=True)
class Registries:
    """The rows that serving depends on, read at one moment."""

    deployments: tuple[Deployment, ...] = ()
    """All deployments, stopped ones included, oldest first, with their versions and models."""
    adapters: tuple[Adapter, ...] = ()
    keys: tuple[ApiKey, ...] = ()


def read_registries() -> Registries:
    """Read the registries. Raises `django.db.Error`."""
    return Registries(
        deployments=tuple(Deployment.objects.select_related("version__model").order_by("created_at")),
        adapters=tuple(Adapter.objects.order_by("name")),
        keys=tuple(ApiKey.objects.filter(revoked=False)),
    )


def build_snapshot(registries: Registries, ready: Iterable[Worker] = ()) -> Snapshot:
    """Build the snapshot: deployments that should run, with their `ready` workers (in launch order) and adapters, and the
    valid API keys. It needs no database.
    """
    serving: dict[int, list[Worker]] = {}
    for worker in ready:
        serving.setdefault(worker.deployment_id, []).append(worker)
    adapters: dict[int, list[AdapterEntry]] = {}
    for adapter in registries.adapters:
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
    for row in registries.deployments:
        if not row.replicas:
            continue
        workers = serving.get(row.pk, [])
        # Publish the version that runs: it may differ from the desired one until the workers are replaced.
        version = workers[-1].version if workers else row.version
        current = sorted((w for w in workers if w.version == version), key=lambda w: (w.index, -w.epoch))
        deployments.append(
            DeploymentEntry(
                name=row.name,
                model=version.model.name,
                version=version.number,
                created=int(row.created_at.timestamp()),
                is_default=row.is_default,
                workers=tuple(WorkerEntry(w.worker_id, w.epoch, w.address, version.pk) for w in current),
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
        for key in registries.keys
    }
    return Snapshot(tuple(deployments), keys)
