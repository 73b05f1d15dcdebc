"""State shared by MindIE's three planes: settings, running requests, metrics."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING
from weakref import WeakSet

from inference.dialects.mindie.errors import STOPPED, MindieError, model_not_found
from inference.dialects.mindie.latency import LatencyWindow
from inference.dialects.mindie.prometheus import MindieMetrics
from inference.dialects.mindie.settings import Capacity, MindieSettings
from inference.generation.running import RunningRequests

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable

    from inference.dialects.mindie.disaggregation.instance import Instance
    from inference.http.exchange import Exchange
    from inference.services import Services
    from inference.workers.router import EngineRouter
    from inference.workers.target import Target


@dataclass(slots=True)
class MindieState:
    """`terminate(force_after_s)` stops the server: None drains, a number kills it after that many seconds."""

    settings: MindieSettings
    router: EngineRouter
    terminate: Callable[[float | None], None]
    instance: Instance | None = None
    """Set where instances have roles (`inferMode` dmi)."""
    running: RunningRequests = field(default_factory=RunningRequests)
    stopping: bool = False
    drain: asyncio.Task[None] | None = None
    """The task that waits for the last request and then stops the server."""
    latency: LatencyWindow = field(init=False)
    metrics: MindieMetrics = field(init=False)
    held: WeakSet[Exchange] = field(default_factory=WeakSet)
    """Inference requests that wait until their deployment is ready for the first time."""
    _count: int = 0

    def __post_init__(self) -> None:
        self.latency = LatencyWindow(self.settings.average_window)
        self.metrics = MindieMetrics(self.router)

    def capacity(self, target: Target) -> Capacity:
        """The capacity of one deployment."""
        return Capacity.of(self.settings, target.info)

    def new_id(self, exchange: Exchange) -> str:
        """A request's internal id: the client's `req-id`, else the next number."""
        given = (exchange.header("req-id") or "")[:1024]
        if given and given.isprintable():
            return given
        self._count += 1
        return f"endpoint_common_{self._count}"

    def check_accepting(self, services: Services) -> None:
        """Raise a MindieError (503) while the service stops."""
        if self.stopping or services.admission.draining:
            raise MindieError(503, STOPPED)

    def named(self, name: str) -> Target:
        """The deployment with exactly this name, or whose model has it. Raises MindieError (404) if there is none, Starting if
        it has never been ready, Unavailable if it has failed before that.
        """
        target = next((t for t in self.router.targets if name in (t.entry.name, t.entry.model)), None)
        if target is not None:
            return target
        entry = next((each for each in self.router.deployments if name in (each.name, each.model)), None)
        if entry is None:
            raise model_not_found(name)
        return self.router.resolve(entry.name)

    def lenient(self, adapter: str | None) -> Target:
        """The default deployment with this adapter; the base model if the adapter is unknown, as in MindIE."""
        target = self.router.resolve(None)
        found = None if adapter is None else target.entry.adapter(adapter)
        return target if found is None else replace(target, adapter=found)
