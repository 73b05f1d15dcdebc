"""What this process knows about one worker: its own requests there, the last report, breaker, pace and prefixes."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from inference.workers.routing.breaker import Breaker
from inference.workers.routing.load import combined
from inference.workers.routing.pace import PaceMeter
from inference.workers.routing.prefixes import PrefixMemory
from inference.workers.routing.selection import Candidate

if TYPE_CHECKING:
    from collections.abc import Callable

    from engine.client import EngineClient
    from engine.messages import Stats
    from inference.workers.routing.demand import Demand


class WorkerRecord:
    """The record of one worker in one epoch. It hears of the reports of its EngineClient."""

    def __init__(self, name: str, clock: Callable[[], float]) -> None:
        """`name` is unique among the deployment's workers; `clock` returns monotonic seconds."""
        self.name, self._clock = name, clock
        self.breaker, self.meter = Breaker(clock), PaceMeter()
        self.load = self.inflight = 0
        """This process's requests: their outstanding tokens, and their number."""
        self.unprefilled = 0
        """Their prompt tokens without an output yet."""
        self.foreign_requests = 0
        self.adapters: Counter[str] = Counter()
        """Digests of the adapters of this process's requests."""
        self._prefixes: PrefixMemory | None = None

    def reported(self, stats: Stats, held: int) -> None:
        """The worker's report arrived; it holds `held` requests of this process."""
        self.foreign_requests = max(0, stats.running + stats.waiting - held)
        self.meter.report(stats, self._clock())

    def prefixes(self, num_blocks: int) -> PrefixMemory:
        """The prompts that were sent; the worker's cache has `num_blocks` blocks."""
        if self._prefixes is None:
            self._prefixes = PrefixMemory(num_blocks)
        return self._prefixes

    def candidate(self, client: EngineClient, demand: Demand, hashes: list[bytes], mean_request: float) -> Candidate:
        """The facts for the choice. `mean_request`: the load of a request on average."""
        info, stats = client.model, client.stats
        free = stats.blocks_total - stats.blocks_used - self.unprefilled // max(1, info.block_size)
        return Candidate(
            self.name,
            load=combined(self.load, self.foreign_requests, mean_request),
            inflight=self.inflight,
            foreign_requests=self.foreign_requests,
            matched_tokens=self.prefixes(info.num_blocks).match(hashes) * info.block_size,
            has_adapter=demand.adapter in stats.adapters or demand.adapter in self.adapters,
            takes_adapters=info.max_adapter_rank > 0,
            free_blocks=free if stats.blocks_total else None,
            usable=client.usable,
            responsive=not client.suspect,
            admitted=self.breaker.admits,
        )
