"""Finds the models and adapters that a body names, and downloads adapters from the hub."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import structlog
from django.conf import settings

from management.api.scalegenai.errors import ApiError, FieldError, InvalidFields, Location
from management.models import Adapter
from management.services import sources as services
from management.services.adapters import read_adapter, register_adapter
from management.services.errors import RegistryError, StoreFull
from management.services.sources import FoundModel

if TYPE_CHECKING:
    from management.adapter_store import StoredAdapter
    from management.api.scalegenai.normaliser import Lora
    from management.models import Deployment

logger = structlog.get_logger(__name__)

ADAPTER_FILES = ["adapter_config.json", "*.safetensors"]
NO_DIRECTORY = "must be a directory with a model that this server may read"
DOWNLOADS = 2
"""Concurrent downloads of one adapter's files."""


@dataclass(frozen=True, slots=True)
class FoundAdapter:
    """An adapter's stored files."""

    name: str
    source: str
    stored: StoredAdapter

    def register(self, deployment: Deployment, location: Location, actor: str) -> None:
        """Register it for the deployment, unless it has it. Raises InvalidFields: another of this name is not replaced."""
        known = Adapter.objects.filter(deployment=deployment, name=self.name).first()
        if known is None:
            try:
                register_adapter(self.name, deployment, self.source, actor, self.stored, replace=False)
            except RegistryError as error:
                known = Adapter.objects.filter(deployment=deployment, name=self.name).first()  # another was quicker
                if known is None:
                    raise InvalidFields([FieldError((*location, "name"), str(error))]) from error
        if known is not None and known.current.digest != self.stored.digest:
            text = "is the name of a registered adapter with other content"
            raise InvalidFields([FieldError((*location, "name"), text, "conflict")])


def find_model(named: str) -> FoundModel:
    """The model: a registered name or source, a directory below `MODEL_ROOTS`, or a hub id. Raises InvalidFields."""
    location: Location = ("model",)
    is_path = _is_path(named) and services.registered_version(named) is None
    try:
        found = services.find_model(
            [str(Path(named).expanduser().absolute()) if is_path else named], (), settings.MODEL_ROOTS
        )
    except (RegistryError, RuntimeError) as error:  # RuntimeError: an unknown user's home
        raise InvalidFields([FieldError(location, NO_DIRECTORY, "path")]) from error
    if found is not None:
        return found
    if not services.HUB_ID.fullmatch(named) or ".." in named:
        raise InvalidFields([FieldError(location, "must be a registered model, a directory or a hub id")])
    return FoundModel(named, named)


def find_adapter(lora: Lora, location: Location) -> FoundAdapter:
    """The adapter's files: a directory below `ADAPTER_ROOTS`, or downloaded from the hub, which may take long. Raises
    InvalidFields.
    """
    place: Location = (*location, "hf_repo")
    roots = settings.ADAPTER_ROOTS
    directory = lora.source
    if not _is_path(lora.source):
        downloaded = _downloaded(lora, place)
        directory, roots = str(downloaded), [downloaded.parent.parent]
    try:
        return FoundAdapter(lora.name, lora.source, read_adapter(directory, roots))
    except StoreFull as error:
        raise ApiError(507, "there is no room on the disk for the adapter") from error
    except RegistryError as error:
        raise InvalidFields([FieldError(place, f"must be a LoRA in PEFT's format; {error}", "adapter")]) from error


def _is_path(named: str) -> bool:
    """A worker prefers a directory to a hub id of the same name, so such a name is a path here as well."""
    try:
        return named.startswith(("/", ".", "~")) or Path(named).exists()
    except OSError:  # a name that is too long for a file
        return False


def _downloaded(lora: Lora, location: Location) -> Path:
    """The adapter's snapshot in the hub's cache. Raises InvalidFields."""
    if not services.HUB_ID.fullmatch(lora.source) or ".." in lora.source:
        raise InvalidFields([FieldError(location, "must be a directory or a hub id")])
    from huggingface_hub import snapshot_download  # only here: it costs every process memory

    repository, limit = lora.source, settings.MAX_ADAPTER_BYTES
    try:
        files = snapshot_download(repository, token=lora.token, allow_patterns=ADAPTER_FILES, dry_run=True)
        if sum(file.file_size or 0 for file in files) > limit:
            text = f"must have at most {limit} bytes"
            raise InvalidFields([FieldError(location, text, "too_large")])
        return Path(
            snapshot_download(repository, token=lora.token, allow_patterns=ADAPTER_FILES, max_workers=DOWNLOADS)
        )
    except InvalidFields:
        raise
    except (
        Exception
    ) as error:  # the hub's client raises its own, httpx's and OSError, some with the request in their text
        logger.warning("adapter not downloaded", repository=repository, error=type(error).__name__)
        text = "cannot be fetched from the hub: it does not exist, needs another token, or the hub is not reachable"
        raise InvalidFields([FieldError(location, text, "hub")]) from error
