"""Finds a model that somebody names: a registered one, a directory in an allowed folder, or a hub id. It downloads nothing."""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from django.db import IntegrityError

from management.models import Adapter, ModelVersion
from management.services.errors import RegistryError
from management.services.models import register_model

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

CONFIG = "config.json"
HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]{0,95}(?:/[A-Za-z0-9][\w.-]{0,95})?", re.ASCII)
MANIFEST = Path("MAR-INF", "MANIFEST.json")
"""Of an unpacked TorchServe archive (https://github.com/pytorch/serve/tree/master/model-archiver)."""
MAX_MANIFEST_BYTES = 1 << 20


class SourceNotAllowed(RegistryError):
    """There is no model in a directory of this name that the server may read."""


@dataclass(frozen=True, slots=True)
class FoundModel:
    """A model's registered version, or the name and source to register. `label` is what its directory says about its
    version.
    """

    name: str
    source: str
    version: ModelVersion | None = None
    label: str = ""

    def registered(self, kind: str, actor: str) -> ModelVersion:
        """Its version, registered now unless it was. Raises RegistryError, and IntegrityError if another transaction takes
        the name: the source would become the next version of the other's model.
        """
        if self.version is not None:
            return self.version
        others = ModelVersion.objects.filter(model__name=self.name).exclude(source=self.source)
        if others.exists() or Adapter.objects.filter(name=self.name).exists():  # a model's name comes first
            suffix = hashlib.sha256(self.source.encode()).hexdigest()[:8]
            return register_model(f"{self.name}-{suffix}", self.source, actor, kind)
        version = register_model(self.name, self.source, actor, kind)
        if others.exists():
            raise IntegrityError
        return version


def find_model(candidates: Sequence[str], folders: Sequence[Path], roots: Sequence[Path] | None) -> FoundModel | None:
    """The first candidate that exists: a registered model's name, `NAME:NUMBER` or source; a directory in one of the `folders`
    or `roots` (None: anywhere), a relative one in one of the `folders`; or a hub id in the local cache. Raises
    SourceNotAllowed if none exists and one is the path of a directory elsewhere.
    """
    forbidden: SourceNotAllowed | None = None
    for named in candidates:
        known = registered_version(named)
        if known is not None:
            return FoundModel(known.model.name, known.source, known)
        try:
            directory = _directory(named, folders, roots)
        except SourceNotAllowed as error:
            forbidden = error
            continue
        if directory is not None:
            known = registered_version(str(directory))
            return FoundModel(_name_of(directory), str(directory), known, _label(directory))
        if is_cached(named):
            return FoundModel(named, named)
    if forbidden is not None:
        raise forbidden
    return None


def registered_version(named: str) -> ModelVersion | None:
    """The default version of the model of this name or source, or the version `NAME:NUMBER`."""
    name, _, number = named.rpartition(":")
    if name and number.isascii() and number.isdigit() and len(number) < 10:
        numbered = ModelVersion.objects.select_related("model").filter(model__name=name, number=int(number)).first()
        if numbered is not None:
            return numbered
    rows = ModelVersion.objects.select_related("model").order_by("pk")
    return (
        rows.filter(is_default=True, model__name=named).first()
        or rows.filter(is_default=True, source=named).first()
        or rows.filter(source=named).first()
    )


def model_directory(named: str, roots: Sequence[Path] | None) -> Path:
    """The directory of this name with a model's configuration, if both are in one of the folders `roots` (None: anywhere)
    after symbolic links. Raises SourceNotAllowed, which does not tell a missing directory from one elsewhere.
    """
    refused = SourceNotAllowed(
        f"model: must be a directory with {CONFIG} that this server may read",
        fields={"model": [f"must be a directory with {CONFIG} that this server may read"]},
    )
    if ".." in Path(named).parts:
        raise refused
    try:
        directory = Path(named).expanduser().resolve()
        config = (directory / CONFIG).resolve()
        there = config.is_file() and _is_within((directory, config), roots)
    except (OSError, ValueError, RuntimeError) as error:  # an unknown user's home, a loop of links
        raise refused from error
    if not there:
        raise refused
    return directory


def is_cached(named: str) -> bool:
    """Whether the hub's local cache has the configuration of the model with this id."""
    if not HUB_ID.fullmatch(named) or ".." in named:
        return False
    from huggingface_hub import try_to_load_from_cache  # only here: it costs every process memory
    from huggingface_hub.errors import HFValidationError

    try:
        return isinstance(try_to_load_from_cache(named, CONFIG), str)
    except HFValidationError:
        return False


def _directory(named: str, folders: Sequence[Path], roots: Sequence[Path] | None) -> Path | None:
    """The directory that a path means; None for a name that is no path of one. Raises SourceNotAllowed."""
    if not named or "\0" in named:
        return None
    if named.startswith(("/", "~")):
        return model_directory(named, None if roots is None else [*roots, *folders])
    for folder in folders:
        try:
            return model_directory(str(folder.resolve() / named), [folder])
        except SourceNotAllowed:
            continue
    return None


def _is_within(paths: Iterable[Path], roots: Sequence[Path] | None) -> bool:
    allowed = None if roots is None else [root.resolve() for root in roots]
    return allowed is None or all(any(path.is_relative_to(root) for root in allowed) for path in paths)


def _name_of(directory: Path) -> str:
    return re.sub(r"[^A-Za-z0-9._-]+", "-", directory.name).lstrip("._-")[:100] or "model"


def _label(directory: Path) -> str:
    """The version that the directory's manifest gives, or an empty text. Raises RegistryError for a manifest that cannot be
    read.
    """
    path = directory / MANIFEST
    if not path.is_file():
        return ""
    try:
        if path.stat().st_size > MAX_MANIFEST_BYTES:
            raise ValueError(f"it has more than {MAX_MANIFEST_BYTES} bytes")
        model = json.loads(path.read_bytes())["model"]
        return str(model.get("modelVersion", ""))[:64]
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise RegistryError(
            "model: its MAR-INF/MANIFEST.json cannot be read", fields={"model": ["has no valid manifest"]}
        ) from error
