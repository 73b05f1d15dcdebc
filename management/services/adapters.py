"""Register and remove adapters. An adapter is read here only as far as its identity goes."""

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
    """Give a PEFT directory a name; the same name with other content replaces it. None leaves a wish as it is."""
    # Before the transaction: nobody waits for a lock while an adapter is read.
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
    """The same for a directory whose `identity` was read already."""
    digest, rank = identity
    adapter = Adapter.objects.filter(name=name).first()
    if adapter is None:
        adapter = Adapter(name=name)
    elif adapter.model_id != model.pk:
        raise RegistryError(f"name: {name} is an adapter of {adapter.model.name}")
    wishes = (
        adapter.preload if preload is None else preload,
        adapter.pinned if pinned is None else pinned,
    )  # fmt: skip
    if (adapter.digest, adapter.source, adapter.preload, adapter.pinned) == (digest, source, *wishes):
        return adapter
    adapter.model, adapter.source, adapter.digest, adapter.rank = model, source, digest, rank
    adapter.preload, adapter.pinned = wishes
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
    """Forget an adapter."""
    audit.record(actor, "adapter.remove", adapter.name)
    adapter.delete()


def read_identity(directory: Path) -> tuple[str, int]:
    """What identifies the adapter's content, and its rank; raises RegistryError when it cannot be served."""
    try:
        identity = identify(directory)
    except AdapterError as error:
        raise RegistryError(f"source: {error}", error.failure) from error
    return identity.digest, identity.rank
