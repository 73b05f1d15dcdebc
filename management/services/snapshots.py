"""Reads the registries from the database, and builds the snapshot from them and the ready workers."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from engine.config import OPTIONS
from management.autoscale.memory import NONE_AFFORDABLE
from management.models import AdapterVersion, ApiKey, Deployment, Price, Secret, Worker
from management.services.capacity import counted_nodes
from management.services.keys import limits_of
from management.services.secrets import HUB_TOKEN
from management.snapshot import (
    AdapterEntry,
    ApiKeyEntry,
    Availability,
    DeploymentEntry,
    Snapshot,
    WorkerEntry,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from management.models import ModelVersion, Node


NUMERIC_OPTIONS = ("device", "dtype", "quantization", "tensor_parallel_size")
"""Engine options on which the last bits of a logit depend."""


@dataclass(frozen=True, slots=True)
class Registries:
    """The rows that serving depends on, read at one moment."""

    deployments: tuple[Deployment, ...] = ()
    """All deployments but deleted ones without workers, oldest first, with their versions and models."""
    adapters: tuple[AdapterVersion, ...] = ()
    """The current versions, in the order of their adapters' registration."""
    keys: tuple[ApiKey, ...] = ()
    prices: tuple[Price, ...] = ()
    nodes: tuple[Node, ...] = ()
    """Without those that have gone."""
    hub_tokens: dict[int, bytes] = field(default_factory=dict)
    """The deployments' tokens for the hub, encrypted, by deployment id."""


def read_registries() -> Registries:
    """Read the registries. Raises `django.db.Error`."""
    rows = Deployment.objects.exclude(state=Deployment.State.DELETED)
    return Registries(
        deployments=tuple(rows.select_related("version__model").order_by("created_at", "pk")),
        adapters=tuple(AdapterVersion.objects.filter(is_current=True).select_related("adapter").order_by("adapter_id")),
        keys=tuple(ApiKey.objects.filter(revoked=False).select_related("deployment")),
        prices=tuple(Price.objects.all()),
        nodes=tuple(counted_nodes()),
        hub_tokens={
            pk: bytes(data)
            for pk, data in Secret.objects.filter(name=HUB_TOKEN).values_list("deployment_id", "ciphertext")
        },
    )


def read_ready_workers() -> tuple[Worker, ...]:
    """The workers that the reconciler has recorded as ready, in launch order, without spares. Raises `django.db.Error`."""
    rows = Worker.objects.filter(state=Worker.State.READY, spare=False).select_related("deployment", "version__model")
    return tuple(rows.order_by("started_at", "pk"))


def build_snapshot(
    registries: Registries,
    ready: Iterable[Worker] = (),
    observed: Callable[[Deployment], tuple[int, str, str]] | None = None,
) -> Snapshot:
    """Build the snapshot: deployments that should serve, with their `ready` workers (in launch order) and adapters, and
    the valid API keys. `observed` gives a deployment's observed generation, state and limit, which may be newer than
    its row. It needs no database.
    """
    serving: dict[int, list[Worker]] = {}
    for worker in ready:
        serving.setdefault(worker.deployment_id, []).append(worker)
    owned: dict[int, list[AdapterEntry]] = {}
    for content in registries.adapters:
        owned.setdefault(content.adapter.deployment_id, []).append(_adapter_entry(content))
    deployments = []
    for row in registries.deployments:
        if row.deleted or not row.wakeable:
            continue
        workers = serving.get(row.pk, [])
        # It may differ from the desired one until the workers are replaced.
        version = _published(workers) if workers else row.version
        current = sorted((w for w in workers if w.version == version), key=lambda w: (w.index, -w.epoch))
        seen = (row.observed_generation, row.state, row.scale_blocked) if observed is None else observed(row)
        deployments.append(
            DeploymentEntry(
                name=row.name,
                model=version.model.name,
                version=version.number,
                created=int(row.created_at.timestamp()),
                is_default=row.is_default,
                workers=tuple(
                    WorkerEntry(w.worker_id, w.epoch, w.address, version.pk, _numerics(w), row.role_of(w.index))
                    for w in current
                ),
                adapters=tuple(owned.get(row.pk, ())),
                public_id=row.public_id,
                title=row.title,
                availability=_availability(row, *seen),
                info=None if row.model_info is None else bytes(row.model_info),
                start_timeout_s=float(row.start_timeout_s),
                chat_template=row.chat_template,
                shares_with=_shared_with(row, registries.deployments, serving),
                served_name=row.served_as,
                label=row.version_label,
                is_default_version=row.is_default_version,
            )
        )
    keys = {key.prefix: _key_entry(key) for key in registries.keys}
    stopped = frozenset(row.public_id for row in registries.deployments if not row.deleted and not row.wakeable)
    return Snapshot(tuple(deployments), keys, stopped)


def _adapter_entry(content: AdapterVersion) -> AdapterEntry:
    adapter = content.adapter
    return AdapterEntry(
        name=adapter.name,
        digest=content.digest,
        directory=content.directory,
        created=int(adapter.created_at.timestamp()),
        preload=adapter.preload,
        pinned=adapter.pinned,
        rank=content.rank,
        source=content.source,
        workers=adapter.workers,
        options=tuple(adapter.options.items()),
    )


def _key_entry(key: ApiKey) -> ApiKeyEntry:
    return ApiKeyEntry(
        prefix=key.prefix,
        name=key.name,
        hashed_key=key.hashed_key,
        scopes=frozenset(key.scopes),
        expires=key.expiry_date.timestamp() if key.expiry_date else None,
        deployment="" if key.deployment is None else key.deployment.public_id,
        limits=limits_of(key),
    )


def _published(workers: list[Worker]) -> ModelVersion:
    """The version that requests get: that of most of the workers, which are in launch order; of equals the newer one."""
    counts = Counter(worker.version for worker in reversed(workers))
    return counts.most_common(1)[0][0]


def _numerics(worker: Worker) -> str:
    """The worker's options that change outputs; a sequence goes on only under the same."""
    return " ".join(f"{name}={worker.engine_options.get(name, OPTIONS[name].default)}" for name in NUMERIC_OPTIONS)


def _availability(row: Deployment, generation: int, state: str, blocked: str) -> Availability:
    """What a request may expect, from the observed state of this generation."""
    current = generation == row.generation
    if current and blocked == NONE_AFFORDABLE:
        return Availability.TOO_DEAR
    if current and state == str(Deployment.State.FAILED):
        return Availability.FAILED
    if state == str(Deployment.State.INACTIVE) and (current or row.stopped):
        return Availability.ASLEEP
    return Availability.COMING


def _shared_with(row: Deployment, others: Iterable[Deployment], serving: dict[int, list[Worker]]) -> str:
    """Another deployment of the same model version that has a ready worker, if this one has none and may share."""
    if not row.share_while_starting or serving.get(row.pk):
        return ""
    for other in others:
        if other.pk != row.pk and other.version_id == row.version_id and serving.get(other.pk) and not other.deleted:
            return other.name
    return ""
