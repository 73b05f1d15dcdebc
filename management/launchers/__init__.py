"""Launchers start engine workers. DRAGOMAN_LAUNCHER chooses one by name; the reconciler uses only the protocol in `base`.

A new launcher is a module with classes that implement `base.Launcher` and `base.WorkerHandle`, and a line in `LAUNCHERS`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from management.launchers.base import Launcher
    from management.launchers.network import Network


def _local(shared: Path | None, network: Network) -> Launcher:
    from management.launchers.leased import LeasedLauncher
    from management.launchers.local import LocalLauncher

    return LocalLauncher(network) if shared is None else LeasedLauncher(shared, network)


def _ray(shared: Path | None, network: Network) -> Launcher:
    from management.launchers.base import LauncherError
    from management.launchers.ray.launcher import RayLauncher

    if shared is None:
        raise LauncherError("LAUNCHER=ray needs `reconcile` and `web`: workers that Ray places do not end with `serve`")
    return RayLauncher(network)


LAUNCHERS: dict[str, Callable[[Path | None, Network], Launcher]] = {"local": _local, "ray": _ray}
"""Launchers by name. Each function imports its module, so that only the chosen launcher is imported; it raises LauncherError if the
settings or what is installed do not suffice for it.

`shared` is None for workers that end with this process. Otherwise they have leases, and it is the folder that all launchers
of the registry on this machine share. `network`: whether workers listen on ports, and which.
"""
