"""Registers and removes models."""

from __future__ import annotations

from django.core.exceptions import ValidationError
from django.db import transaction

from management.models import Deployment, Model, ModelVersion, Worker
from management.services import audit
from management.services.errors import RegistryError


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
    model, created = Model.objects.get_or_create(name=name, defaults={"kind": kind})
    if created:
        try:
            model.full_clean()
        except ValidationError as error:
            raise RegistryError(f"name: {'; '.join(error.messages)}") from error
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
    """Remove a model that no deployment uses. Raises RegistryError for others."""
    mine = Deployment.objects.filter(version__model=model)
    if (
        mine.filter(deleted=False).exists()
        or Worker.objects.filter(deployment__in=mine, state__in=Worker.LIVE).exists()
    ):
        raise RegistryError(f"{model.name} has deployments; remove them first")
    mine.delete()  # the records of deleted ones
    audit.record(actor, "model.remove", model.name)
    model.delete()
