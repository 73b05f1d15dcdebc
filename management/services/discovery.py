"""Registers the adapters in the folder `adapters/` beside a model, each under its directory's name, as DJL Serving does."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import structlog

from management.models import Adapter
from management.services import audit
from management.services.adapters import read_adapter, register_adapter
from management.services.errors import RegistryError

if TYPE_CHECKING:
    from management.models import ModelVersion

logger = structlog.get_logger(__name__)

FOLDER = "adapters"
MAX_DISCOVERED = 1000


def register_beside(version: ModelVersion, actor: str) -> None:
    """Register what is not registered yet. An adapter that cannot be served is left out, and the audit log says why."""
    folder = Path(version.source) / FOLDER
    if not Path(version.source).is_absolute() or folder.is_symlink() or not folder.is_dir():
        return
    known = set(Adapter.objects.filter(model=version.model).values_list("name", flat=True))
    found = sorted(path for path in folder.iterdir() if path.is_dir() and not path.name.startswith("."))
    for directory in found[:MAX_DISCOVERED]:
        if directory.name in known:
            continue
        try:
            stored = read_adapter(str(directory), [folder])
            register_adapter(directory.name, version.model, str(directory), actor, stored, replace=False)
        except RegistryError as error:
            logger.warning("adapter beside the model not registered", directory=str(directory), reason=str(error))
            audit.record(actor, "adapter.not_registered", directory.name, model=version.model.name, reason=str(error))
