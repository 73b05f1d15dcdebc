"""Start engine workers and hear of their state. The reconciler knows only `base`; DRAGOMAN_LAUNCHER chooses by name.

A new launcher is a module with what `base.Launcher` and `base.WorkerHandle` ask for, and a line in `LAUNCHERS`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from management.launchers.base import Launcher


def _local() -> Launcher:
    from management.launchers.local import LocalLauncher

    return LocalLauncher()


LAUNCHERS: dict[str, Callable[[], Launcher]] = {"local": _local}
"""By name; each imports what it needs only when it is chosen."""
