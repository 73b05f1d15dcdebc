"""Register and remove adapters. An adapter is read here only as far as its identity goes."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

from django.core.exceptions import ValidationError
from django.db import transaction

from management.models import Adapter, Model
from management.services import audit
from management.services.errors import RegistryError

FILES = ("adapter_config.json", "adapter_model.safetensors")


@transaction.atomic
def register_adapter(
    name: str, model: Model, source: str, actor: str, preload: bool | None = None, pinned: bool | None = None
) -> Adapter:
    """Give a PEFT directory a name; the same name with other content replaces it. None leaves a wish as it is."""
    digest, rank = read_identity(Path(source))
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
    """SHA-256 over the adapter's two files, and its rank; raises RegistryError when it is no PEFT LoRA."""
    digest = hashlib.sha256()
    for name in FILES:
        if not (directory / name).is_file():
            raise RegistryError(f"source: {name} is missing in the adapter's directory")
        with (directory / name).open("rb") as file:
            digest.update(hashlib.file_digest(file, "sha256").digest())
    try:
        config = json.loads((directory / FILES[0]).read_text())
        rank, kind = config["r"], config["peft_type"]
    except (ValueError, KeyError, TypeError) as error:
        raise RegistryError("source: adapter_config.json is not a PEFT configuration") from error
    if kind != "LORA" or not isinstance(rank, int) or not 1 <= rank <= 256:
        raise RegistryError("source: the adapter must be a LoRA with a rank between 1 and 256")
    return digest.hexdigest(), rank
