"""Finds the models and adapters that a body names: registered ones, directories below the allowed folders, hub ids."""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import structlog
from django.conf import settings
from django.db import IntegrityError
from huggingface_hub import snapshot_download

from engine.adapters.files import CONFIG, WEIGHTS
from management.api.scalegenai.errors import FieldError, InvalidFields, Location
from management.models import Adapter, Model, ModelVersion
from management.services.adapters import read_identity, register_read_adapter
from management.services.errors import RegistryError
from management.services.models import register_model

if TYPE_CHECKING:
    from management.api.scalegenai.normaliser import Lora

logger = structlog.get_logger(__name__)

ADAPTER_FILES = ["adapter_config.json", "*.safetensors"]
DOWNLOADS = 2
"""Concurrent downloads of one adapter's files."""
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]{0,95}(?:/[A-Za-z0-9][\w.-]{0,95})?", re.ASCII)


@dataclass(frozen=True, slots=True)
class FoundModel:
    """A model's registered version, or the name and source to register."""

    name: str
    source: str
    version: ModelVersion | None = None

    def registered(self, kind: str, actor: str) -> ModelVersion:
        """Its version, registered now unless it was. Raises RegistryError, and IntegrityError if another transaction takes
        the name: the source would become the next version of the other's model.
        """
        if self.version is not None:
            return self.version
        others = ModelVersion.objects.filter(model__name=self.name).exclude(source=self.source)
        if others.exists():
            suffix = hashlib.sha256(self.source.encode()).hexdigest()[:8]
            return register_model(f"{self.name}-{suffix}", self.source, actor, kind)
        version = register_model(self.name, self.source, actor, kind)
        if others.exists():
            raise IntegrityError
        return version


@dataclass(frozen=True, slots=True)
class FoundAdapter:
    """An adapter's files and their digest and rank."""

    name: str
    source: str
    identity: tuple[str, int]

    def registered(self, model: Model, location: Location, actor: str) -> Adapter:
        """Its row, registered now unless it was. Raises InvalidFields: nothing registered is replaced, because other
        deployments may serve it.
        """
        known = Adapter.objects.filter(name=self.name).first()
        if known is None:
            try:
                return register_read_adapter(self.name, model, self.source, actor, self.identity)
            except RegistryError as error:
                known = Adapter.objects.filter(name=self.name).first()  # another transaction was quicker
                if known is None:
                    raise InvalidFields([FieldError((*location, "name"), str(error))]) from error
        if (known.digest, known.model_id) != (self.identity[0], model.pk):
            text = "is the name of a registered adapter with other content or of another model"
            raise InvalidFields([FieldError((*location, "name"), text, "conflict")])
        return known


def find_model(named: str) -> FoundModel:
    """The model: a registered name or source, a directory below `MODEL_ROOTS`, or a hub id. Raises InvalidFields."""
    known = _default_version(model__name=named) or _default_version(source=named)
    if known is not None:
        return FoundModel(known.model.name, known.source, known)
    location: Location = ("model",)
    if not _is_path(named):
        if not _HUB_ID.fullmatch(named) or ".." in named:
            raise InvalidFields([FieldError(location, "must be a registered model, a directory or a hub id")])
        return FoundModel(named, named)
    directory = str(_allowed_directory(named, settings.MODEL_ROOTS, ("config.json",), location))
    known = _default_version(source=directory)
    if known is not None:
        return FoundModel(known.model.name, directory, known)
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", Path(directory).name).lstrip("._-")[:100] or "model"
    return FoundModel(name, directory)


def find_adapter(lora: Lora, location: Location) -> FoundAdapter:
    """The adapter's files: a directory below `ADAPTER_ROOTS`, or downloaded from the hub, which may take long. Raises
    InvalidFields.
    """
    place: Location = (*location, "hf_repo")
    if _is_path(lora.source):
        directory = _allowed_directory(lora.source, settings.ADAPTER_ROOTS, (CONFIG, WEIGHTS), place)
    else:
        directory = _downloaded(lora, place)
    try:
        return FoundAdapter(lora.name, str(directory), read_identity(directory))
    except RegistryError as error:
        raise InvalidFields([FieldError(place, f"must be a LoRA in PEFT's format; {error}", "adapter")]) from error


def _default_version(**wanted: str) -> ModelVersion | None:
    rows = ModelVersion.objects.select_related("model").filter(is_default=True, **wanted)
    return rows.order_by("pk").first()


def _is_path(named: str) -> bool:
    """A worker prefers a directory to a hub id of the same name, so such a name is a path here as well."""
    try:
        return named.startswith(("/", ".", "~")) or Path(named).exists()
    except OSError:  # a name that is too long for a file
        return False


def _allowed_directory(named: str, roots: list[Path] | None, files: tuple[str, ...], location: Location) -> Path:
    """The directory, if it and its `files` are below one of the folders (None: anywhere) after symbolic links. The refusal
    does not tell a missing directory from one elsewhere.
    """
    refused = InvalidFields(
        [FieldError(location, f"must be a directory with {' and '.join(files)} that this server may read", "path")]
    )
    if ".." in Path(named).parts:
        raise refused
    try:
        directory = Path(named).expanduser().resolve()
        paths = [(directory / file).resolve() for file in files]
        there = all(path.is_file() for path in paths)
        if roots is not None:
            allowed = [root.resolve() for root in roots]
            there &= all(any(path.is_relative_to(root) for root in allowed) for path in (directory, *paths))
    except (OSError, ValueError, RuntimeError) as error:  # an unknown user's home, a loop of links
        raise refused from error
    if not there:
        raise refused
    return directory


def _downloaded(lora: Lora, location: Location) -> Path:
    """The adapter's snapshot in the hub's cache. Raises InvalidFields."""
    if not _HUB_ID.fullmatch(lora.source) or ".." in lora.source:
        raise InvalidFields([FieldError(location, "must be a directory or a hub id")])
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
