"""Prepares the registry at the start of a server: its tables and the first user. Of several processes that start at once, one does it
after the other.
"""

from __future__ import annotations

import fcntl
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING

from django.core.management import call_command
from django.db import connection

from config.first_admin import ensure_admin

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from django.db.backends.utils import CursorWrapper

PREPARING = 0x64726168
"""PostgreSQL's advisory lock of this work; `management.services.deployments` has the number before it."""
TRY_EVERY_S = 0.1


def prepare_registry(data_dir: Path) -> None:
    """Migrate, and make the user `admin` if nobody may administer yet. Raises `django.db.Error` or OSError."""
    with _alone(data_dir):
        call_command("migrate", verbosity=0, interactive=False)
        ensure_admin(data_dir / "admin-password")


@contextmanager
def _alone(data_dir: Path) -> Iterator[None]:
    """Wait until no other process prepares this registry."""
    if connection.vendor == "postgresql":
        with connection.cursor() as cursor:
            # A session's lock, which ends with the process. It is asked for again and again, because a statement that waits has a limit.
            while not _taken(cursor):
                time.sleep(TRY_EVERY_S)
            try:
                yield
            finally:
                cursor.execute("SELECT pg_advisory_unlock(%s)", [PREPARING])
        return
    data_dir.mkdir(parents=True, exist_ok=True)
    with (data_dir / "registry.lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _taken(cursor: CursorWrapper) -> bool:
    """Whether this session has the lock now."""
    cursor.execute("SELECT pg_try_advisory_lock(%s)", [PREPARING])
    return bool(cursor.fetchone()[0])
