"""Django's backend for PostgreSQL, with a client-side timeout for every answer.

`statement_timeout` is enforced by the server process, and TCP time-outs by the kernel of its machine: neither ends a
wait for a server process that is stopped or swapped out while its machine goes on. So the client needs its own
timeout.
"""

from __future__ import annotations

from time import monotonic
from typing import TYPE_CHECKING, Any, TypeVar

from django.db.backends.postgresql import base, schema
from psycopg import OperationalError

if TYPE_CHECKING:
    from collections.abc import Callable, Generator

T = TypeVar("T")

ANSWER_TIMEOUT_S = 6.0
"""Longer than the server's statement_timeout, whose error says more."""


class DatabaseSchemaEditor(schema.DatabaseSchemaEditor):
    """Migrations run without the timeout."""

    def __enter__(self) -> DatabaseSchemaEditor:
        super().__enter__()
        self.connection.patient = True
        if self.atomic_migration and not self.collect_sql:
            self.execute("SET LOCAL statement_timeout = 0", params=None)
        return self

    def __exit__(self, exc_type: Any, exc_value: Any, traceback: Any) -> None:
        try:
            super().__exit__(exc_type, exc_value, traceback)
        finally:
            self.connection.patient = False


class DatabaseWrapper(base.DatabaseWrapper):
    """The connection of one thread."""

    SchemaEditorClass = DatabaseSchemaEditor
    patient = False

    def get_new_connection(self, conn_params: dict[str, Any]) -> Any:
        """Connect within `connect_timeout`; every later answer must come within ANSWER_TIMEOUT_S."""
        connection = super().get_new_connection(conn_params)
        wait = connection.wait

        def wait_with_timeout(generator: Generator[Any, Any, T], *arguments: Any, **options: Any) -> T:
            """Like psycopg's wait, which resumes the generator ten times a second whether data has come or not."""
            result: T = wait(
                generator if self.patient else _bounded(generator, connection.close), *arguments, **options
            )
            return result

        connection.wait = wait_with_timeout
        return connection


def _bounded(generator: Generator[Any, Any, T], close: Callable[[], None]) -> Generator[Any, Any, T]:
    """The same generator; raises OperationalError when no data has come for too long."""
    deadline = monotonic() + ANSWER_TIMEOUT_S
    try:
        wanted = next(generator)
        while True:
            ready = yield wanted
            if not ready and monotonic() > deadline:
                generator.close()
                close()  # what the server may still answer must not reach the next query
                raise OperationalError(f"no answer from the database within {ANSWER_TIMEOUT_S:.0f} s")
            wanted = generator.send(ready)
    except StopIteration as end:
        result: T = end.value
        return result
