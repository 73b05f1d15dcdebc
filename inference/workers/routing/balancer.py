"""Assigns requests to the workers of one deployment, and ejects workers that fail or fall behind for a time."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Literal

import structlog

from inference.workers.routing.assignment import Assignment
from inference.workers.routing.breaker import BreakerState
from inference.workers.routing.load import DECODE_COST, PRIOR_TOKENS, ExpectedLengths
from inference.workers.routing.pace import outliers
from inference.workers.routing.selection import choose, eligible
from inference.workers.routing.worker_record import WorkerRecord

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping
    from random import Random

    from engine.client import EngineClient
    from inference.workers.routing.demand import Demand
    from management.snapshot import WorkerEntry

logger = structlog.get_logger(__name__)

LEARNING = 0.05
"""The weight of the last request in the mean load of a request."""
EjectionReason = Literal["failures", "latency"]


class Balancer:
    """The records of a deployment's workers, and the choice among them."""

    def __init__(self, clock: Callable[[], float], random: Random) -> None:
        """`clock` returns monotonic seconds."""
        self._clock, self._random = clock, random
        self._records: dict[WorkerEntry, WorkerRecord] = {}
        self._mean_request = float(DECODE_COST * PRIOR_TOKENS)
        self._lengths = ExpectedLengths()
        self.ejections: Counter[EjectionReason] = Counter()

    def record(self, worker: WorkerEntry) -> WorkerRecord:
        """The record of a worker, made at the first call."""
        if worker not in self._records:
            self._records[worker] = WorkerRecord(f"{worker.worker_id}@{worker.epoch}", self._clock)
        return self._records[worker]

    def retain(self, workers: Collection[WorkerEntry]) -> None:
        """Forget all other workers."""
        self._records = {worker: record for worker, record in self._records.items() if worker in workers}

    def assign(
        self, clients: Mapping[WorkerEntry, EngineClient], demand: Demand, avoid: Collection[EngineClient] = ()
    ) -> Assignment | None:
        """An assignment to one of the clients' workers, but none of `avoid`; None if no worker can be used."""
        workers = {self.record(w).name: w for w, client in clients.items() if client not in avoid}
        if not workers:
            return None
        block_size = max(1, next(iter(clients.values())).model.block_size)
        # With a single worker nothing is compared, so nothing is hashed.
        hashes = demand.block_hashes(block_size) if len(clients) > 1 else []
        candidates = [
            self._records[w].candidate(clients[w], demand, hashes, self._mean_request)
            # In a fixed order, whichever connected first.
            for _, w in sorted(workers.items())
        ]
        able = eligible(candidates, -(-demand.num_tokens // block_size), bool(demand.adapter))
        if not able:
            return None
        chosen = choose(able, demand, self._random)
        worker = workers[chosen.name]
        client, record = clients[worker], self._records[worker]
        record.prefixes(client.model.num_blocks).record(hashes)
        uncached = 1 if demand.fetched else max(1, demand.num_tokens - chosen.matched_tokens)
        expected = self._lengths.expect(demand.tenant, demand.max_tokens)
        assignment = Assignment(
            self,
            record,
            client,
            demand,
            uncached=uncached,
            expected=expected,
            kind=worker.kind,
            role=worker.role,
        )
        self._mean_request += LEARNING * (uncached + DECODE_COST * expected - self._mean_request)
        return assignment

    def eject_slow(self, clients: Mapping[WorkerEntry, EngineClient]) -> None:
        """Eject the workers whose pace is an outlier; called a few times a second."""
        for worker in self._slow([w for w, client in clients.items() if client.usable and not client.suspect]):
            record = self._records[worker]
            pace = record.meter.pace
            record.breaker.trip()
            record.meter.reset()
            self._note_ejection(record, "latency", step_ms=round((pace.recent_s or 0.0) * 1e3))

    def succeeded(self, record: WorkerRecord, demand: Demand, produced: int, probe: bool) -> None:
        """A request ended well, after `produced` tokens. A probe ends the ejection unless the worker was slow again."""
        self._lengths.learn(demand.tenant, produced)
        if probe and record in [self._records[worker] for worker in self._slow(list(self._records))]:
            record.meter.reset()
            record.breaker.fail(probe)
            self._note_ejection(record, "latency")
        elif probe:
            record.breaker.succeed(probe)
            logger.info("worker back in rotation", worker=record.name)

    def failed(self, record: WorkerRecord, probe: bool) -> None:
        """A request failed by the worker's fault."""
        if record.breaker.fail(probe):
            self._note_ejection(record, "failures")

    def _slow(self, workers: list[WorkerEntry]) -> list[WorkerEntry]:
        """The workers among these that are to be ejected because they are slow."""
        closed = [w for w in workers if self.record(w).breaker.state is not BreakerState.OPEN]
        paces = {worker: self._records[worker].meter.pace for worker in closed}
        return outliers(paces, ejected=len(workers) - len(closed))

    def _note_ejection(self, record: WorkerRecord, reason: EjectionReason, **facts: object) -> None:
        self.ejections[reason] += 1
        logger.warning("worker ejected", worker=record.name, reason=reason, **facts)
