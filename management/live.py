"""The workers' latest engine statistics, from the process that is connected to them. No database."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from engine.adapters.failures import AdapterFailure
    from engine.messages import Stats

_source: Callable[[], dict[str, Stats]] = dict


def set_source(source: Callable[[], dict[str, Stats]]) -> None:
    """Set the function that returns the Stats of each worker's last heartbeat, by worker id."""
    global _source
    _source = source


def adapter_failure(digest: str) -> AdapterFailure | None:
    """Why a worker could not load the adapter when it last needed it; None unless one could not."""
    return next((s.failed_adapters[digest] for s in _source().values() if digest in s.failed_adapters), None)


def stats() -> dict[str, Stats]:
    """The latest Stats by worker id; empty in a process without connections to workers."""
    return _source()
