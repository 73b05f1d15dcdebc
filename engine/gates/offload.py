"""A request whose prefix goes on in a tier of the KV offload waits until those blocks have come back, but no longer than computing
them is expected to take.

It does not block later requests. The blocks are put into the prefix cache right before the scheduler looks there, so they count as
cached, and nothing else in the engine knows where they were.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

from engine.gates.base import Gate
from engine.request import RequestStatus

if TYPE_CHECKING:
    from collections.abc import Sequence

    from engine.block_pool import BlockPool
    from engine.offload.disk import Staged
    from engine.offload.offload import Offload
    from engine.request import Request
    from engine.step_time import StepTime

LEAST_WAIT_S, MOST_WAIT_S = 0.1, 10.0
"""Bounds of the time that a request waits for a disk."""
FIRST_WAIT_S = 1.0
"""The seconds that a request waits for a disk before it is known how fast the worker computes."""


@dataclass(slots=True)
class _Return:
    """What comes back for one waiting request: the last blocks of `chain`, those that are still to be put into the cache."""

    chain: list[bytes]
    found: list[Staged]
    deadline: float


class OffloadGate(Gate):
    """Asks the tiers when it is a request's turn."""

    def __init__(self, offload: Offload, pool: BlockPool, step_time: StepTime, max_num_batched_tokens: int) -> None:
        """`step_time` says what computing would take in steps of `max_num_batched_tokens`."""
        self._offload, self._pool, self._step_time = offload, pool, step_time
        self._step_tokens = max_num_batched_tokens
        self._returns: WeakKeyDictionary[Request, _Return] = WeakKeyDictionary()
        self._running: Sequence[Request] = ()
        self._blocks_left = 0

    def poll(self, busy: bool) -> None:
        for request in [r for r in self._returns if r.status is not RequestStatus.WAITING]:
            del self._returns[request]  # it may be preempted, and come here again

    def begin(self, running: Sequence[Request]) -> None:
        self._running = running
        self._blocks_left = self._offload.blocks_at_once

    def consider(self, request: Request) -> None:
        if request in self._returns:
            return
        wanted = self._pool.reusable(request)
        head = self._pool.match(wanted)
        found, cached = self._offload.find(wanted, len(head)), len(head)
        if found:  # without the blocks before them those that come would be of no use
            self._pool.refresh(head)
        wait_s = self._compute_s(len(found) * self._pool.block_size) if found else 0.0
        self._returns[request] = _Return(wanted[: cached + len(found)], found, time.monotonic() + wait_s)

    def may_start(self, request: Request) -> bool:
        coming = self._returns[request]
        if not coming.found:
            return True
        if not all(staged.done for staged in coming.found):
            if time.monotonic() < coming.deadline:
                return False
            self._offload.late += 1
            come = next(i for i, staged in enumerate(coming.found) if not staged.done)
            self._shorten(coming, come)
        count = min(len(coming.found), self._blocks_left) if self._running else len(coming.found)
        now, later = coming.found[:count], coming.found[count:]
        if now:
            self._offload.bring(coming.chain[: len(coming.chain) - len(later)], now)
            self._blocks_left -= count
        coming.found = later
        return not later

    def _shorten(self, coming: _Return, count: int) -> None:
        """Go on with the first `count` blocks alone."""
        del coming.chain[len(coming.chain) - len(coming.found) + count :]
        del coming.found[count:]

    def _compute_s(self, tokens: int) -> float:
        """Seconds that computing these tokens is expected to take, within the bounds."""
        decoding = sum(request.decodes for request in self._running)
        rate = self._step_time.prefill_rate(min(tokens, self._step_tokens), decoding)
        return min(max(tokens / rate, LEAST_WAIT_S), MOST_WAIT_S) if rate else FIRST_WAIT_S
