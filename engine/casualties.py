"""Counts worker deaths per request. A request that was in flight at two deaths is refused, because it may cause them.

Requests are identified by their content without seed, deadline and generated tokens, so a client's retry and a replay
count as the same request. A request that ends normally is forgotten. The cause of a death is not examined.
"""

from __future__ import annotations

import hashlib
import time
from collections import OrderedDict

import msgspec

from engine.messages import Embed, Submit

MAX_DEATHS = 2
FORGET_AFTER_S = 600.0
"""Deaths are forgotten after this time, so that a request that was in flight by chance is not refused for ever."""
MAX_REMEMBERED = 4096


class Casualties:
    """Worker deaths by request. One instance serves all workers of a process."""

    def __init__(self) -> None:
        self._deaths: OrderedDict[bytes, tuple[frozenset[str], float]] = OrderedDict()

    def died(self, message: Submit | Embed, worker: str) -> None:
        """Record that `worker` (id and epoch) died while the request was in flight. Identical requests that were in
        flight at one death count once.
        """
        key = _fingerprint(message)
        self._deaths[key] = (self._seen(key) | {worker}, time.monotonic())
        self._deaths.move_to_end(key)
        if len(self._deaths) > MAX_REMEMBERED:
            self._deaths.popitem(last=False)

    def survived(self, message: Submit | Embed) -> None:
        """Forget a request that ended normally."""
        if self._deaths:
            self._deaths.pop(_fingerprint(message), None)

    def refuses(self, message: Submit | Embed) -> bool:
        """Whether the request must be refused: it was in flight at MAX_DEATHS deaths."""
        return bool(self._deaths) and len(self._seen(_fingerprint(message))) >= MAX_DEATHS

    def _seen(self, key: bytes) -> frozenset[str]:
        workers, when = self._deaths.get(key, (frozenset(), 0.0))
        return workers if time.monotonic() - when < FORGET_AFTER_S else frozenset()


def _fingerprint(message: Submit | Embed) -> bytes:
    same = msgspec.structs.replace(message, request_id=0, timeout_s=None)
    if isinstance(same, Submit):
        same = msgspec.structs.replace(same, params=msgspec.structs.replace(same.params, seed=0), generated=[])
    return hashlib.blake2b(msgspec.msgpack.encode(same), digest_size=16).digest()
