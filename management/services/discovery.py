"""Registers the adapters in the folder `adapters/` beside a model, each under its directory's name, as DJL Serving does."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import structlog

from management.models import Adapter
from management.services import audit
from management.services.adapters import read_adapter, refuse_invalid, register_adapter
from management.services.errors import RegistryError

if TYPE_CHECKING:
    from management.models import Deployment

logger = structlog.get_logger(__name__)

FOLDER = "adapters"
MAX_DISCOVERED = 1000
MAX_SHOWN = 200
"""Characters of a directory's name in the audit log."""


def register_beside(deployment: Deployment, actor: str) -> None:
    """Register what the deployment does not have yet. An adapter that cannot be served is left out, and the audit log
    says why.
    """
    source = deployment.version.source
    folder = Path(source) / FOLDER
    if not Path(source).is_absolute() or folder.is_symlink() or not folder.is_dir():
        return
    known = set(Adapter.objects.filter(deployment=deployment).values_list("name", flat=True))
    try:
        found = sorted(path for path in folder.iterdir() if path.is_dir() and not path.name.startswith("."))
    except OSError as error:
        logger.warning("adapters beside the model not listed", folder=str(folder), reason=error.strerror)
        return
    for directory in found[:MAX_DISCOVERED]:
        if directory.name in known:
            continue
        shown = directory.name.encode(errors="backslashreplace").decode()  # a file's name may be no text
        try:
            refuse_invalid(directory.name)  # before its files are copied
            stored = read_adapter(str(directory), [folder])
            register_adapter(directory.name, deployment, str(directory), actor, stored, replace=False)
        except RegistryError as error:
            logger.warning("adapter beside the model not registered", name=shown, folder=str(folder), reason=str(error))
            audit.record(
                actor, "adapter.not_registered", shown[:MAX_SHOWN], deployment=deployment.name, reason=str(error)
            )
