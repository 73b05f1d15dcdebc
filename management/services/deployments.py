"""Create, start, stop and remove deployments: desired state only. What becomes of it is the reconciler's business."""

from __future__ import annotations

from typing import Any

import msgspec
from django.core.exceptions import ValidationError
from django.db import transaction
from django.db.models import F

from engine.config import RESERVED, EngineConfig
from management.models import Deployment, ModelVersion
from management.services import audit
from management.services.errors import RegistryError

RESERVED_NAMES = {"tgi", "dummy"}
MAX_REPLICAS = 64


@transaction.atomic
def create_deployment(
    name: str, version: ModelVersion, actor: str, engine_options: dict[str, Any] | None = None
) -> Deployment:
    """A stopped deployment. The first one is the default."""
    options = check_engine_options(engine_options or {})
    if name in RESERVED_NAMES:
        raise RegistryError(f"name: {name} always means the default deployment")
    first = not Deployment.objects.filter(is_default=True).exists()
    deployment = Deployment(name=name, version=version, engine_options=options, is_default=first)
    try:
        deployment.full_clean()
    except ValidationError as error:
        raise RegistryError("; ".join(error.messages)) from error
    deployment.save()
    audit.record(actor, "deployment.create", name, version=str(version), engine_options=options)
    return deployment


@transaction.atomic
def start_deployment(deployment: Deployment, actor: str, replicas: int = 1) -> None:
    """Ask for so many workers; one that failed gets a fresh chance."""
    if not 1 <= replicas <= MAX_REPLICAS:
        raise RegistryError(f"replicas: must be between 1 and {MAX_REPLICAS}, got {replicas}")
    changed = Deployment.objects.filter(pk=deployment.pk)
    changed.update(replicas=replicas, generation=F("generation") + 1)
    audit.record(actor, "deployment.start", deployment.name, replicas=replicas)


@transaction.atomic
def stop_deployment(deployment: Deployment, actor: str) -> None:
    """Ask for no workers; those that run finish their requests first."""
    Deployment.objects.filter(pk=deployment.pk).update(replicas=0)
    audit.record(actor, "deployment.stop", deployment.name)


@transaction.atomic
def make_default(deployment: Deployment, actor: str) -> None:
    """Let this deployment answer requests that name no model."""
    Deployment.objects.filter(is_default=True).update(is_default=False)
    Deployment.objects.filter(pk=deployment.pk).update(is_default=True)
    audit.record(actor, "deployment.make_default", deployment.name)


@transaction.atomic
def change_deployment(
    deployment: Deployment, version: ModelVersion, engine_options: dict[str, Any], actor: str
) -> None:
    """Another version or other options; workers that run keep theirs until the next start."""
    options = check_engine_options(engine_options)
    Deployment.objects.filter(pk=deployment.pk).update(version=version, engine_options=options)
    audit.record(actor, "deployment.change", deployment.name, version=str(version), engine_options=options)


@transaction.atomic
def remove_deployment(deployment: Deployment, actor: str) -> None:
    """Remove a deployment that is stopped."""
    current = Deployment.objects.select_for_update().get(pk=deployment.pk)
    if current.replicas or current.state not in (Deployment.State.STOPPED, Deployment.State.FAILED):
        raise RegistryError(f"{deployment.name} is {current.state}; stop it first")
    audit.record(actor, "deployment.remove", deployment.name)
    current.delete()


def check_engine_options(options: dict[str, Any]) -> dict[str, Any]:
    """The options if an engine would accept them; raises RegistryError that names the field."""
    if not isinstance(options, dict):
        raise RegistryError("engine_options: must be an object")
    reserved = sorted(RESERVED & set(options))
    if reserved:
        raise RegistryError(f"engine_options.{reserved[0]}: is set by the launcher")
    try:
        msgspec.convert({**options, "model": "x"}, EngineConfig)
    except (msgspec.ValidationError, ValueError) as error:
        raise RegistryError(f"engine_options: {error}") from error
    return options
