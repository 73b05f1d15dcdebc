"""Registers and removes adapters. It reads an adapter's digest and rank, no tensors."""

from __future__ import annotations

from pathlib import Path

from django.core.exceptions import ValidationError
from django.db import transaction

from engine.adapters.failures import AdapterError
from management.adapter_identity import identify
from management.models import Adapter, Model
from management.services import audit
from management.services.errors import RegistryError


def register_adapter(
    name: str, model: Model, source: str, actor: str, preload: bool | None = None, pinned: bool | None = None
) -> Adapter:
    """Register a PEFT directory under a name; other content under the same name replaces it. `preload` and `pinned` None
    keep their present values. Raises RegistryError.
    """
    # Hash the files before the transaction, so that no lock is held meanwhile.
    return register_read_adapter(name, model, source, actor, read_identity(Path(source)), preload, pinned)


@transaction.atomic
def register_read_adapter(
    name: str,
    model: Model,
    source: str,
    actor: str,
    identity: tuple[str, int],
    preload: bool | None = None,
    pinned: bool | None = None,
) -> Adapter:
    """Register a directory whose `identity` (digest and rank) is known. Raises RegistryError."""
    digest, rank = identity
    adapter = Adapter.objects.filter(name=name).first()
    if adapter is None:
        adapter = Adapter(name=name)
    elif adapter.model_id != model.pk:
        raise RegistryError(f"name: {name} is an adapter of {adapter.model.name}")
    flags = (
        adapter.preload if preload is None else preload,
        adapter.pinned if pinned is None else pinned,
    )  # fmt: skip
    if (adapter.digest, adapter.source, adapter.preload, adapter.pinned) == (digest, source, *flags):
        return adapter
    adapter.model, adapter.source, adapter.digest, adapter.rank = model, source, digest, rank
    adapter.preload, adapter.pinned = flags
    try:
        adapter.full_clean()
    except ValidationError as error:
        raise RegistryError("; ".join(error.messages)) from error
    adapter.save()
    audit.record(actor, "adapter.register", name, model=model.name, source=source, digest=digest,
                 preload=adapter.preload, pinned=adapter.pinned)  # fmt: skip
    return adapter


@transaction.atomic
def remove_adapter(adapter: Adapter, actor: str) -> None:
    """Remove an adapter from the registry."""
    audit.record(actor, "adapter.remove", adapter.name)
    adapter.delete()


def read_identity(directory: Path) -> tuple[str, int]:
    """The digest and rank of an adapter. Raises RegistryError if it cannot be served."""
    try:
        identity = identify(directory)
    except AdapterError as error:
        raise RegistryError(f"source: {error}", error.failure) from error
    return identity.digest, identity.rank
