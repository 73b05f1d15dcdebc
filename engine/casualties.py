"""Which requests were in flight when workers died: one that saw two deaths may well be their cause, and is refused.

Requests are told apart by what a worker sees of them, their seed and deadline apart, so a client that sends the same again
sends the same request. What ends well was not the cause, and is forgotten. It never looks at why a worker died.
"""

from __future__ import annotations

import hashlib
import time
from collections import OrderedDict

import msgspec

from engine.messages import Embed, Submit

MAX_DEATHS = 2
FORGET_AFTER_S = 600.0
"""A request that stood beside the cause twice is not refused for ever."""
MAX_REMEMBERED = 4096


class Casualties:
    """Deaths by request. One for all workers that a process talks to."""

    def __init__(self) -> None:
        self._deaths: OrderedDict[bytes, tuple[frozenset[str], float]] = OrderedDict()

    def died(self, message: Submit | Embed, worker: str) -> None:
        """The worker, named with its epoch, died before the request ended; its equals beside it count with it."""
        key = _fingerprint(message)
        self._deaths[key] = (self._seen(key) | {worker}, time.monotonic())
        self._deaths.move_to_end(key)
        if len(self._deaths) > MAX_REMEMBERED:
            self._deaths.popitem(last=False)

    def survived(self, message: Submit | Embed) -> None:
        """It ended, and its worker lives."""
        if self._deaths:
            self._deaths.pop(_fingerprint(message), None)

    def refuses(self, message: Submit | Embed) -> bool:
        """Whether it has seen so many deaths that no other worker should meet it."""
        return bool(self._deaths) and len(self._seen(_fingerprint(message))) >= MAX_DEATHS

    def _seen(self, key: bytes) -> frozenset[str]:
        workers, when = self._deaths.get(key, (frozenset(), 0.0))
        return workers if time.monotonic() - when < FORGET_AFTER_S else frozenset()


def _fingerprint(message: Submit | Embed) -> bytes:
    same = msgspec.structs.replace(message, request_id=0, timeout_s=None)
    if isinstance(same, Submit):
        same = msgspec.structs.replace(same, params=msgspec.structs.replace(same.params, seed=0))
    return hashlib.blake2b(msgspec.msgpack.encode(same), digest_size=16).digest()
