"""A request with an adapter waits until the adapter is loaded and in a slot.

It does not block later requests, but they may not use the adapter whose slot it will take over.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from engine.failures import Failure, FailureCode, adapter_failure
from engine.gates.base import Gate

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from engine.adapters.slots import AdapterSlots
    from engine.request import Request


class AdapterGate(Gate):
    """Loads adapters and puts them into slots in the order of the requests."""

    def __init__(self, adapters: AdapterSlots) -> None:
        self._adapters = adapters
        self._running: Sequence[Request] = ()
        self._closing: dict[str, str] = {}
        """Adapters that wait for a slot -> the adapter that will be evicted for them; of the current step's
        admissions.
        """
        self._ahead: set[str] = set()
        """Digests of the adapters of running requests and of those considered so far."""

    def refusal(self, request: Request) -> Failure | None:
        if request.adapter is not None and self._adapters.request(request.adapter) is not None:
            return Failure(FailureCode.TAKES_NO_ADAPTERS)
        return None

    def poll(self, busy: bool) -> None:
        self._adapters.poll(busy)

    def failures(self, requests: Sequence[Request]) -> Iterable[tuple[Request, Failure]]:
        adapted = [(r, self._adapters.failure(r.adapter.digest)) for r in requests if r.adapter is not None]
        return [(request, adapter_failure(found)) for request, found in adapted if found is not None]

    def begin(self, running: Sequence[Request]) -> None:
        self._running, self._closing = running, {}
        self._ahead = {r.adapter.digest for r in running if r.adapter is not None}

    def consider(self, request: Request) -> None:
        if request.adapter is not None:
            self._ahead.add(request.adapter.digest)

    def may_start(self, request: Request) -> bool:
        """Whether the request's adapter is in a slot. Loading it may evict a cached adapter, but none that an earlier
        request needs. If all slots are in use, no later request may use the adapter that will be evicted for it.
        """
        adapter, adapters, closing = request.adapter, self._adapters, self._closing
        if adapter is None:
            return True
        if not adapters.begin(adapter, keep=self._ahead) or not adapters.loaded(adapter.digest):
            return False
        if adapter.digest in closing or adapter.digest in closing.values():
            return False
        busy = Counter(r.adapter.digest for r in self._running if r.adapter is not None)
        if adapters.acquire(adapter, busy):
            return True
        leaving = closing.values()
        candidates = [digest for digest in busy if digest not in leaving and not adapters.pinned(digest)]
        if candidates:
            closing[adapter.digest] = min(candidates, key=lambda digest: busy[digest])
        return False
