"""Counts worker deaths per request. A request that was in flight at two deaths, suspect both times, and got no further the second
time, is refused, because it may cause them; at MAX_DEATHS it is refused in any case.

Suspect are the requests that had brought nothing on the worker that died, or all if each had brought something: who had run there for
a while, and is in flight again when a poisonous request kills the next worker at its first step, is not refused with it.
A request that makes a worker die does so at the same token again, as its replay computes the same. One that was in flight by
chance has got further by then. Requests are identified by their content without seed, deadline, order of service, salt, generated tokens
and where their KV blocks are, so a client's retry, a replay, and the prefill and the decode of a request that is split count as the same
request. A request that ends normally is forgotten; one that moves to another worker is not. The cause of a death is not examined.
"""

from __future__ import annotations

import hashlib
import time
from collections import OrderedDict

import msgspec

from engine.messages import Embed, Submit

MAX_DEATHS = 4
FORGET_AFTER_S = 600.0
"""Deaths are forgotten after this time, so that a request that was in flight by chance is not refused for ever."""
MAX_REMEMBERED = 4096


class Casualties:
    """Worker deaths by request. One instance serves all workers of a process."""

    def __init__(self) -> None:
        self._deaths: OrderedDict[bytes, tuple[dict[str, tuple[int, bool]], float]] = OrderedDict()
        """By request: the workers, in the order of their deaths, with the number of tokens that it had reached and whether it was
        suspect; when.
        """

    def died(self, message: Submit | Embed, worker: str, reached: int, suspect: bool = True) -> None:
        """Record that `worker` (id and epoch) died while the request was in flight, with `reached` output tokens. Identical
        requests that were in flight at one death count once, as the one that got furthest.
        """
        key = _fingerprint(message)
        seen = self._seen(key)
        before = seen.get(worker, (0, False))
        self._deaths[key] = {**seen, worker: (max(reached, before[0]), suspect or before[1])}, time.monotonic()
        self._deaths.move_to_end(key)
        if len(self._deaths) > MAX_REMEMBERED:
            self._deaths.popitem(last=False)

    def survived(self, message: Submit | Embed) -> None:
        """Forget a request that ended normally."""
        if self._deaths:
            self._deaths.pop(_fingerprint(message), None)

    def refuses(self, message: Submit | Embed) -> bool:
        """Whether the request must be refused."""
        if not self._deaths:
            return False
        deaths = list(self._seen(_fingerprint(message)).values())
        if len(deaths) < 2 or len(deaths) >= MAX_DEATHS:
            return len(deaths) >= MAX_DEATHS
        (before, suspect_before), (reached, suspect) = deaths[-2:]
        return suspect_before and suspect and reached <= before

    def _seen(self, key: bytes) -> dict[str, tuple[int, bool]]:
        workers, when = self._deaths.get(key, ({}, 0.0))
        return workers if time.monotonic() - when < FORGET_AFTER_S else {}


def _fingerprint(message: Submit | Embed) -> bytes:
    same: Submit | Embed
    if isinstance(message, Submit):
        params = msgspec.structs.replace(message.params, seed=0)
        same = Submit(0, message.prompt_token_ids, params, adapter=message.adapter)
    else:
        same = msgspec.structs.replace(message, request_id=0, timeout_s=None)
    return hashlib.blake2b(msgspec.msgpack.encode(same), digest_size=16).digest()
