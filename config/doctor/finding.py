"""What a check found."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum


class Level(IntEnum):
    """How bad a finding is; the worst one is the exit status."""

    OK = 0
    WARNING = 1
    """The server starts, but perhaps not as it should."""
    ERROR = 2
    """The server does not start, or does not serve."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the report. `text` contains no secrets; `hint` says what to do."""

    check: str
    level: Level
    text: str
    hint: str = ""


def ok(check: str, text: str) -> Finding:
    """Nothing is wrong."""
    return Finding(check, Level.OK, text)


def warning(check: str, text: str, hint: str = "") -> Finding:
    """Something may be wrong."""
    return Finding(check, Level.WARNING, text, hint)


def error(check: str, text: str, hint: str = "") -> Finding:
    """Something is wrong."""
    return Finding(check, Level.ERROR, text, hint)
