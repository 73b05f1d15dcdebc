"""Writes the desired state of deployments: create, start, stop, change, remove. The reconciler acts on it."""

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
    """Create a stopped deployment; the first one becomes the default. Raises RegistryError."""
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
    """Set the desired number of workers and raise the generation, which resets a failed deployment."""
    if not 1 <= replicas <= MAX_REPLICAS:
        raise RegistryError(f"replicas: must be between 1 and {MAX_REPLICAS}, got {replicas}")
    changed = Deployment.objects.filter(pk=deployment.pk)
    changed.update(replicas=replicas, generation=F("generation") + 1)
    audit.record(actor, "deployment.start", deployment.name, replicas=replicas)


@transaction.atomic
def stop_deployment(deployment: Deployment, actor: str) -> None:
    """Set the desired number of workers to 0; running workers finish their requests first."""
    Deployment.objects.filter(pk=deployment.pk).update(replicas=0)
    audit.record(actor, "deployment.stop", deployment.name)


@transaction.atomic
def make_default(deployment: Deployment, actor: str) -> None:
    """Make this deployment the one that answers requests without a model name."""
    Deployment.objects.filter(is_default=True).update(is_default=False)
    Deployment.objects.filter(pk=deployment.pk).update(is_default=True)
    audit.record(actor, "deployment.make_default", deployment.name)


@transaction.atomic
def change_deployment(
    deployment: Deployment, version: ModelVersion, engine_options: dict[str, Any], actor: str
) -> None:
    """Set the version and engine options; they take effect at the next start."""
    options = check_engine_options(engine_options)
    Deployment.objects.filter(pk=deployment.pk).update(version=version, engine_options=options)
    audit.record(actor, "deployment.change", deployment.name, version=str(version), engine_options=options)


@transaction.atomic
def remove_deployment(deployment: Deployment, actor: str) -> None:
    """Remove a stopped or failed deployment. Raises RegistryError for others."""
    current = Deployment.objects.select_for_update().get(pk=deployment.pk)
    if current.replicas or current.state not in (Deployment.State.STOPPED, Deployment.State.FAILED):
        raise RegistryError(f"{deployment.name} is {current.state}; stop it first")
    audit.record(actor, "deployment.remove", deployment.name)
    current.delete()


def check_engine_options(options: dict[str, Any]) -> dict[str, Any]:
    """Validate engine options and return them. Raises RegistryError that names the field."""
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
