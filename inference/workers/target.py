"""A deployment as requests see it: its model, its tokenizer, and the workers that are connected, which may be none."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from engine.messages import AdapterRef
from inference.workers.routing.stages import Stage
from management.snapshot import Availability, WorkerRole

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    from engine.client import EngineClient
    from engine.messages import ModelInfo
    from inference.workers.routing.assignment import Assignment
    from inference.workers.routing.balancer import Balancer
    from inference.workers.routing.demand import Demand
    from inference.workers.routing.retry_budget import RetryBudget
    from inference.workers.tokenizer import ModelTokenizer
    from management.snapshot import AdapterEntry, DeploymentEntry, WorkerEntry


class Superseded(Exception):
    """Only workers of another model version are left: what was prepared for the old one must be prepared for `target`."""

    def __init__(self, target: Target) -> None:
        super().__init__()
        self.target = target


@dataclass(slots=True)
class Target:
    """One deployment in this process."""

    entry: DeploymentEntry
    info: ModelInfo
    tokenizer: ModelTokenizer
    balancer: Balancer
    retries: RetryBudget
    clients: dict[WorkerEntry, EngineClient] = field(default_factory=dict)
    version: int = 0
    """The model version (`WorkerEntry.model_version`) that `info` and `tokenizer` are of. `clients` may have workers of others."""
    wakes: str = ""
    """The public id of a sleeping deployment for which this one serves; set only in the result of `resolve`."""
    adapter: AdapterEntry | None = None
    """The requested adapter; set only in the result of `resolve`."""

    @property
    def adapter_ref(self) -> AdapterRef | None:
        """The adapter as the engine's AdapterRef."""
        return None if self.adapter is None else AdapterRef(self.adapter.digest, self.adapter.directory)

    def assign(
        self, demand: Demand, fits: Callable[[WorkerEntry], bool] = lambda _: True, avoid: Collection[EngineClient] = ()
    ) -> Assignment | None:
        """The worker for a request (`inference.workers.routing`) among those that fit; None if there is none. Workers that
        drain or are without recent heartbeats get nothing. One that is meant for the other stage gets it only if no other can.
        """
        stage = Stage.DECODE if demand.fetched else Stage.PREFILL
        clients = {worker: client for worker, client in self.clients.items() if fits(worker)}
        suited = {worker: client for worker, client in clients.items() if stage.suits(worker.role)}
        assignment = self.balancer.assign(suited, demand, avoid)
        if assignment is not None:
            assignment.splits = assignment.role is WorkerRole.PREFILL and any(
                Stage.DECODE.suits(worker.role) and client.usable and not client.suspect
                for worker, client in clients.items()
            )
        elif len(suited) < len(clients):
            assignment = self.balancer.assign(clients, demand, avoid)
        return assignment

    def holder(self, name: str) -> tuple[WorkerEntry, EngineClient] | None:
        """The connected worker of this id and epoch (`ID@EPOCH`), or None."""
        found = (pair for pair in self.clients.items() if f"{pair[0].worker_id}@{pair[0].epoch}" == name)
        return next(found, None)

    def retry(self, avoid: Collection[EngineClient]) -> bool:
        """Whether a request that the workers of `avoid` did not take may be sent to another: there is one, and not too many
        requests were sent again lately.
        """
        return self.others(avoid) and self.retries.withdraw()

    def others(self, avoid: Collection[EngineClient]) -> bool:
        """Whether a responsive worker is not among `avoid`."""
        return any(client not in avoid for client in self.responsive)

    @property
    def asleep(self) -> bool:
        """Whether it has no workers until a request wakes it."""
        return self.entry.availability is Availability.ASLEEP

    @property
    def serves(self) -> bool:
        """Whether a responsive worker serves its model version."""
        return any(
            worker.model_version == self.version and client.usable and not client.suspect
            for worker, client in self.clients.items()
        )

    @property
    def responsive(self) -> list[EngineClient]:
        """Usable workers with recent heartbeats."""
        return [client for client in self.clients.values() if client.usable and not client.suspect]

    def relieve(self) -> None:
        """Move requests without a first token from silent workers to others, if there are any; eject slow workers."""
        if self.responsive:
            for client in self.clients.values():
                if client.suspect:
                    client.release_waiting()
        self.balancer.eject_slow(self.clients)


def other_version(target: Target, deployment: DeploymentEntry) -> WorkerEntry | None:
    """A connected worker of the deployment if the target is of another model version than all of its workers."""
    if any(worker.model_version == target.version for worker in deployment.workers):
        return None
    return next((w for w in deployment.workers if w in target.clients and target.clients[w].usable), None)
