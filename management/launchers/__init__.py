"""Launchers start engine workers. DRAGOMAN_LAUNCHER chooses one by name; the reconciler uses only the protocol in `base`.

A new launcher is a module with classes that implement `base.Launcher` and `base.WorkerHandle`, and a line in `LAUNCHERS`.
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
"""Launchers by name. Each function imports its module, so that only the chosen launcher is imported."""
