"""What web processes report about the load of deployments, for the autoscaler. Imports no ORM."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import msgspec

from management.autoscale.signals import LoadGauges, LoadSlice

if TYPE_CHECKING:
    from collections.abc import Sequence


class DeploymentLoad(msgspec.Struct, frozen=True):
    """The load of one deployment at one web process: the last seconds, the present, and unfinished requests by worker id."""

    slices: tuple[LoadSlice, ...] = ()
    gauges: LoadGauges = LoadGauges()
    running: dict[str, int] = {}


class LoadReport(msgspec.Struct, frozen=True):
    """A report of one web process. `at` and all times in it are monotonic seconds of its machine; `deployments` are by
    public id. A report repeats slices of earlier ones, so that a lost report loses nothing.
    """

    process: str
    at: float
    deployments: dict[str, DeploymentLoad]


class LoadSource(Protocol):
    """Where the reconciler gets the reports from."""

    def reports(self) -> Sequence[LoadReport]:
        """The last report of every web process that has not signed off. Never blocks."""
