"""Tells other processes that the registries have changed: NOTIFY on PostgreSQL. Elsewhere they poll.

A notification carries nothing: who hears it reads the registries, as everybody does from time to time anyway. Who polls asks first
whether anything was written.
"""

from __future__ import annotations

import threading
from contextvars import ContextVar

from django.db import connection, connections

CHANNEL = "dragoman_changes"


written: ContextVar[list[bool] | None] = ContextVar("written", default=None)
"""A list that `announce` fills, of who wants to know whether this request wrote anything."""


def announce() -> None:
    """Notify, when the present transaction is committed."""
    if (asked := written.get()) is not None:
        asked.append(True)
    if connection.vendor == "postgresql":
        with connection.cursor() as cursor:
            cursor.execute(f"NOTIFY {CHANNEL}")


def version() -> object:
    """What differs after any write that this thread could read now. Raises `django.db.Error`.

    SQLite counts the writes of other connections (sqlite.org/pragma.html#pragma_data_version) and of this one; on PostgreSQL equal
    snapshots see equal rows.
    """
    with connection.cursor() as cursor:
        cursor.execute("select pg_current_snapshot()" if connection.vendor == "postgresql" else "pragma data_version")
        (seen,) = cursor.fetchone()
    own = 0 if connection.vendor == "postgresql" else connection.connection.total_changes
    return connection.connection, str(seen), own


class Changes:
    """Waits for changes on a connection of its own."""

    def __init__(self) -> None:
        self._listening = None
        if connection.vendor == "postgresql":
            self._listening = connections.create_connection("default")

    def wait(self, timeout_s: float, stop: threading.Event) -> None:
        """Return after a change, after `timeout_s` at the latest, or at once when `stop` is set and nothing is waited for.

        Raises `django.db.Error`.
        """
        if self._listening is None:
            stop.wait(timeout_s)
            return
        if self._listening.connection is None:
            with self._listening.cursor() as cursor:
                cursor.execute(f"LISTEN {CHANNEL}")
        with self._listening.wrap_database_errors:
            for _ in self._listening.connection.notifies(timeout=timeout_s, stop_after=1):
                return

    def close(self) -> None:
        """Close the connection; the next `wait` opens another."""
        if self._listening is not None:
            self._listening.close()
