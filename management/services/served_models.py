"""Creates deployments as versions of a served name, from whatever a client names as their model."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from django.conf import settings
from django.db import IntegrityError, transaction

from management.models import Deployment, ModelVersion
from management.services.deployments import RESERVED_NAMES, create_deployment, start_deployment, versions_of
from management.services.discovery import register_beside
from management.services.errors import RegistryError, SourceNotFound, VersionExists
from management.services.models import register_model
from management.services.sources import FoundModel, find_model

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from management.models import Model

ENGINE_OPTIONS = ("device", "dtype", "threads", "kv_cache_bytes")
"""The server's own settings of the machine, which every deployment shares."""
ATTEMPTS = 3


@dataclass(frozen=True, slots=True)
class NewVersion:
    """A version to create; see `inference.workers.registry.NewDeployment`, which has the same fields."""

    candidates: Sequence[str]
    served_name: str
    label: str = ""
    workers: int = 0
    max_workers: int | None = None
    vendor_fields: Mapping[str, Any] = field(default_factory=dict)
    folders: Sequence[Path] = ()
    only: bool = False


def create_version(wanted: NewVersion, actor: str) -> Deployment:
    """Register the model unless it is, create the deployment, start its workers, and register the adapters beside the model.

    Raises SourceNotFound, SourceNotAllowed, VersionExists or RegistryError, and IntegrityError if other calls take the name again
    and again; nothing has changed then.
    """
    for _ in range(ATTEMPTS - 1):
        with suppress(IntegrityError):  # another call took a name, perhaps for another version
            return _created(wanted, actor)
    return _created(wanted, actor)


def _created(wanted: NewVersion, actor: str) -> Deployment:
    found = find_model(wanted.candidates, wanted.folders, settings.MODEL_ROOTS)
    if found is None:
        raise SourceNotFound("model: no model of this name is known here", fields={"model": ["is not known"]})
    deployment = _write(wanted, found, actor)
    register_beside(deployment, actor)
    return deployment


@transaction.atomic
def _write(wanted: NewVersion, found: FoundModel, actor: str) -> Deployment:
    name = wanted.served_name or found.name.rpartition("/")[2]  # these servers' paths have no place for an owner's name
    if name in RESERVED_NAMES:
        raise RegistryError(f"name: {name} always means the default deployment", fields={"name": ["is reserved"]})
    others = versions_of(name)
    if wanted.only and others:
        raise VersionExists(name, others[-1].version_label)
    version = _registered(name, found, others, actor)
    label = wanted.label or found.label
    same = next((other for other in others if other.version_id == version.pk), None)
    if not label and same is not None:
        raise VersionExists(name, same.version_label)
    labels = {other.version_label for other in others}
    if label in labels:
        raise VersionExists(name, label)
    if not label:
        label = f"{version.number}.0"
        if label in labels:
            label = _free_label(labels)
    taken = Deployment.objects.filter(name=name, deleted=False).exists()
    maximum = wanted.workers if wanted.max_workers is None else wanted.max_workers
    options = {option: settings.ENGINE_OPTIONS[option] for option in ENGINE_OPTIONS}
    deployment = create_deployment(
        f"{name}/{label}" if taken else name,
        version,
        actor,
        options,
        served_name=name,
        label=label,
        title=name,
        min_workers=wanted.workers,
        max_workers=max(1, maximum),
        vendor_fields=dict(wanted.vendor_fields),
    )
    if wanted.workers:
        start_deployment(deployment, actor, wanted.workers)
    return deployment


def _registered(name: str, found: FoundModel, others: Sequence[Deployment], actor: str) -> ModelVersion:
    """The found model's version. A new source becomes the next version of the model that is the served name's own, or a new
    model; another's model stays as it is, for its name means its default version.
    """
    if found.version is not None:
        return found.version
    model: Model | None = others[-1].version.model if others else None
    if model is not None and model.name == name:
        return register_model(model.name, found.source, actor, model.kind)
    return FoundModel(name, found.source).registered("llm", actor)


def _free_label(labels: set[str]) -> str:
    number = 1
    while f"{number}.0" in labels:
        number += 1
    return f"{number}.0"
