"""Tells an unavailable database from a fault of the program."""

from __future__ import annotations

from django.db import DataError, Error, IntegrityError, NotSupportedError, ProgrammingError

RETRY_AFTER_S = 5
OURS = (DataError, IntegrityError, NotSupportedError, ProgrammingError)
"""Database errors that are faults of the program; all others mean that the database is unavailable."""


def is_unavailable(error: BaseException | None) -> bool:
    """Whether an error, or its cause, means that the database is unavailable."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        if isinstance(error, Error) and not isinstance(error, OURS):
            return True
        seen.add(id(error))
        error = error.__cause__ or error.__context__
    return False
