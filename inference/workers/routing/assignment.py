"""A request at a worker: counts in the worker's load until it ends, and tells the breaker how it ended."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from engine.failures import FailureCode
from inference.workers.routing.load import outstanding
from management.snapshot import WorkerRole

if TYPE_CHECKING:
    from engine.client import EngineClient
    from engine.messages import RequestOutput
    from inference.workers.routing.demand import Demand
    from inference.workers.routing.worker_record import WorkerRecord

WORKER_FAULTS = (FailureCode.STEP_FAILED,)
"""Failures that speak against the worker, not against the request."""


class EndObserver(Protocol):
    """Hears how requests end; implemented by the balancer."""

    def succeeded(self, record: WorkerRecord, demand: Demand, produced: int, probe: bool) -> None:
        """The request ended well, with `produced` tokens. `probe`: the breaker waits for the verdict."""

    def failed(self, record: WorkerRecord, probe: bool) -> None:
        """The request failed by the worker's fault."""


class Assignment:
    """One request at the worker of `client`. `end`, `fail` or `leave` must follow; only the first of them counts."""

    def __init__(
        self,
        observer: EndObserver,
        record: WorkerRecord,
        client: EngineClient,
        demand: Demand,
        *,
        uncached: int,
        expected: int,
        kind: tuple[int, str] = (0, ""),
        role: WorkerRole = WorkerRole.BOTH,
    ) -> None:
        """`kind` and `role`: of the worker (`WorkerEntry`); `uncached`: the prompt tokens that the worker must prefill; `expected`: the
        expected length of the output.
        """
        self.client, self.kind, self.role = client, kind, role
        self.splits = False
        """Whether another worker should go on with the sequence when this one has computed its prompt."""
        self._observer, self._record, self._demand = observer, record, demand
        self._uncached, self._expected, self._produced = uncached, expected, 0
        self._load = outstanding(uncached, expected, 0, demand.max_tokens)
        self._open = True
        self._probe = record.breaker.begin()
        record.load += self._load
        record.unprefilled += uncached
        record.inflight += 1
        record.adapters[demand.adapter] += 1

    def note(self, output: RequestOutput) -> None:
        """An output arrived."""
        if not self._open:
            return
        if output.error is not None and output.error.code in WORKER_FAULTS:
            self.fail()
            return
        self._produced += len(output.token_ids)
        self._record.unprefilled -= self._uncached
        self._uncached = 0
        load = outstanding(0, self._expected, self._produced, self._demand.max_tokens)
        self._record.load += load - self._load
        self._load = load
        if output.finish_reason is not None:  # what another worker goes on with says nothing of an output's length
            self.end() if output.error is None and output.source is None else self.leave()

    def end(self) -> None:
        """The request ended well."""
        if self._release():
            self._observer.succeeded(self._record, self._demand, self._produced, self._probe)

    def fail(self) -> None:
        """The request failed by the worker's fault."""
        if self._release():
            self._observer.failed(self._record, self._probe)

    def leave(self) -> None:
        """The request ended otherwise: its client left, or it was refused for what it asked."""
        if self._release():
            self._record.breaker.forget(self._probe)

    def _release(self) -> bool:
        """Take the request out of the load. Returns False if it is out already."""
        if not self._open:
            return False
        self._open, record = False, self._record
        record.load -= self._load
        record.unprefilled -= self._uncached
        record.inflight -= 1
        record.adapters[self._demand.adapter] -= 1
        if not record.adapters[self._demand.adapter]:
            del record.adapters[self._demand.adapter]
        return True
