"""What the database's driver says, in one line for operators. No text of a driver has a password."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from django.db import Error

NO_TABLE = ("no such table", "no such column", "does not exist")
"""How SQLite and PostgreSQL say that `migrate` has not run."""


def one_line(error: Error) -> str:
    """The text, which may be several lines."""
    return "; ".join(line.strip() for line in str(error).splitlines() if line.strip()) or type(error).__name__


def with_advice(error: Error) -> str:
    """The text, and what to do if tables are missing."""
    text = one_line(error)
    return text + ("; run `migrate` first" if any(words in text for words in NO_TABLE) else "")
