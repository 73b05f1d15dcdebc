"""The folders of KV blocks on this machine's disk: one for each deployment, which its workers share and outlive their restarts. A folder
goes when its deployment does, because what prompts computed should not outlive it. Reads no block.
"""

from __future__ import annotations

import shutil
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import structlog
from django.conf import settings

if TYPE_CHECKING:
    from collections.abc import Collection

logger = structlog.get_logger(__name__)

GRACE_S = 600.0
"""The least age of a folder that is removed: its deployment may be newer than what is known."""


def offload_folder(deployment: int) -> str:
    """The folder of the deployment with this id."""
    return str(Path(settings.KV_OFFLOAD) / str(deployment))


def sweep_offload_folders(known: Collection[int]) -> threading.Thread | None:
    """Remove the folders of all deployments but these, in a thread, since one may have very many files; None if there are none."""
    leftover = []
    with suppress(FileNotFoundError, NotADirectoryError):
        for folder in Path(settings.KV_OFFLOAD).iterdir():
            if folder.name.isdecimal() and int(folder.name) not in known:
                with suppress(FileNotFoundError):  # another process was quicker
                    if time.time() - folder.lstat().st_mtime > GRACE_S:
                        leftover.append(folder)
    if not leftover:
        return None
    thread = threading.Thread(target=_remove, args=(leftover,), name="offload-sweep", daemon=True)
    thread.start()
    return thread


def _remove(folders: list[Path]) -> None:
    for folder in folders:
        logger.info("KV blocks of a deleted deployment removed", folder=folder.name)
        shutil.rmtree(folder, ignore_errors=True)
