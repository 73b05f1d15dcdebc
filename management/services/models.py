"""Registers and removes models."""

from __future__ import annotations

from django.core.exceptions import ValidationError
from django.db import transaction
from django.db.models import Q

from management.models import Deployment, Model, ModelVersion, Worker
from management.services import audit
from management.services.errors import RegistryConflict, RegistryError


@transaction.atomic
def register_model(name: str, source: str, actor: str, kind: str = "llm") -> ModelVersion:
    """Register `source` under a name. A new source for a known name becomes its next version, and its default one. Raises
    RegistryError.
    """
    if "://" in source:  # which is not repeated: it may have a password
        raise RegistryError("source: a directory or a hub id is expected, not an address")
    longest = ModelVersion._meta.get_field("source").max_length
    if longest is not None and len(source) > longest:
        text = f"must have at most {longest} characters"
        raise RegistryError(f"source: {text}", fields={"source": [text]})
    try:  # before anything is written: PostgreSQL refuses what is too long in words of its own
        Model(name=name, kind=kind).clean_fields()
    except ValidationError as error:
        raise RegistryError(f"name: {'; '.join(error.messages)}", fields={"name": error.messages}) from error
    model, _ = Model.objects.get_or_create(name=name, defaults={"kind": kind})
    Model.objects.select_for_update(no_key=True).get(
        pk=model.pk
    )  # of two sources at once each gets a number of its own
    current = model.versions.filter(is_default=True).first()
    if current is not None and current.source == source:
        return current
    latest = model.versions.order_by("-number").first()
    model.versions.update(is_default=False)
    version = model.versions.create(number=1 if latest is None else latest.number + 1, source=source)
    audit.record(actor, "model.register", str(version), source=source)
    return version


@transaction.atomic
def remove_model(model: Model, actor: str) -> None:
    """Remove a model that no deployment and no worker uses. Raises RegistryError for others."""
    # None that is created or changed meanwhile gets one of the versions: its row refers to them, and waits.
    if not Model.objects.select_for_update().filter(pk=model.pk).exists():
        raise RegistryConflict(f"{model.name} is removed")
    list(ModelVersion.objects.select_for_update().filter(model=model))
    mine = Deployment.objects.filter(version__model=model)
    # After a change of a deployment's version its workers may have this one for a while.
    live = Worker.objects.filter(Q(version__model=model) | Q(deployment__in=mine), state__in=Worker.LIVE)
    if mine.filter(deleted=False).exists() or live.exists():
        raise RegistryError(f"{model.name} has deployments; remove them first")
    mine.filter(deleted=True).delete()  # the records
    audit.record(actor, "model.remove", model.name)
    model.delete()
