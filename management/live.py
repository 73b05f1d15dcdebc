"""What the workers' engines say of themselves right now. Filled by whoever is connected to them; no database."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from engine.messages import Stats

_source: Callable[[], dict[str, Stats]] = dict


def set_source(source: Callable[[], dict[str, Stats]]) -> None:
    """`source` gives the last heartbeat's Stats by worker id."""
    global _source
    _source = source


def stats() -> dict[str, Stats]:
    """Empty in a process that has no connection to workers."""
    return _source()
