"""Holds requests for deployments without a ready worker until one comes: asleep, starting, or restarting.

The queue is bounded, for each deployment and in total. When it is full and several keys wait, the newest request of the key
with the most is refused instead of one of a key with fewer. Requests go on in turn between the keys, each key's in order of
arrival; the engine's own queue then keeps that order.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter, deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from inference.errors import Overloaded, OverShare, ShuttingDown, Unavailable

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

OVERFLOW_RETRY_AFTER_S = 5
EXPIRED_RETRY_AFTER_S = 5


@dataclass(eq=False, slots=True)
class HeldRequest:
    """One waiting request: its deployment (public id), its key, and when it arrived (monotonic seconds)."""

    deployment: str
    tenant: str
    since: float
    released: asyncio.Future[None] = field(default_factory=lambda: asyncio.get_running_loop().create_future())


class HoldQueue:
    """The waiting requests of this process."""

    def __init__(self, max_per_deployment: int = 64, max_total: int = 256) -> None:
        self.max_per_deployment, self.max_total = max_per_deployment, max_total
        self.on_refused: Callable[[str], None] = lambda deployment: None
        """Called with the deployment of each request for which there is no room."""
        self.on_first: Callable[[], None] = lambda: None
        """Called when a request begins to wait for a deployment that no other one waits for."""
        self._held: list[HeldRequest] = []

    async def wait(self, deployment: str, tenant: str, timeout_s: float) -> None:
        """Wait until `release` lets this request go on. Raises Overloaded if there is no room, Unavailable after
        `timeout_s` seconds or if the deployment fails meanwhile, ShuttingDown on `close`.
        """
        self._make_room(deployment, tenant)
        held = HeldRequest(deployment, tenant, time.monotonic())
        self._held.append(held)
        if self.count(deployment) == 1:
            self.on_first()
        try:
            async with asyncio.timeout(timeout_s):
                await held.released
        except TimeoutError as error:
            raise unavailable("The model did not start in time.") from error
        finally:
            if held in self._held:
                self._held.remove(held)

    def wake(self, deployment: str) -> None:
        """A request for a sleeping deployment is served elsewhere: as one that finds no room here, it wakes it."""
        self.on_refused(deployment)
        self.on_first()

    def release(self, deployment: str) -> None:
        """Let every request of the deployment go on."""
        for held in self._in_turn(deployment):
            if not held.released.done():
                held.released.set_result(None)

    def refuse(self, deployment: str, reason: str) -> None:
        """Refuse every request of the deployment: it will not start. `reason` is for the clients."""
        for held in self._of(deployment):
            if not held.released.done():
                held.released.set_exception(unavailable(reason))

    def close(self) -> None:
        """Refuse every request: the server shuts down."""
        for held in self._held:
            if not held.released.done():
                held.released.set_exception(ShuttingDown("The server is shutting down."))

    def count(self, deployment: str) -> int:
        """How many requests wait for the deployment."""
        return len(self._of(deployment))

    @property
    def deployments(self) -> set[str]:
        """The deployments that requests wait for."""
        return {held.deployment for held in self._held}

    def _of(self, deployment: str) -> list[HeldRequest]:
        return [held for held in self._held if held.deployment == deployment]

    def _make_room(self, deployment: str, tenant: str) -> None:
        """Refuse the newest request of the heaviest key, or raise Overloaded if that is the caller's own."""
        for group, limit in ((self._of(deployment), self.max_per_deployment), (self._held, self.max_total)):
            if len(group) < limit:
                continue
            by_tenant = Counter(held.tenant for held in group)
            heaviest, most = by_tenant.most_common(1)[0] if by_tenant else (tenant, 0)
            if most <= by_tenant[tenant] + 1:
                self.on_refused(deployment)
                raise overflow()
            newest = next(held for held in reversed(group) if held.tenant == heaviest)
            self._held.remove(newest)
            self.on_refused(newest.deployment)
            if not newest.released.done():
                newest.released.set_exception(over_share())

    def _in_turn(self, deployment: str) -> Iterator[HeldRequest]:
        """The deployment's requests: the first of each key, then the second of each, and so on."""
        queues: dict[str, deque[HeldRequest]] = {}
        for held in self._of(deployment):
            queues.setdefault(held.tenant, deque()).append(held)
        while queues:
            for tenant in list(queues):
                yield queues[tenant].popleft()
                if not queues[tenant]:
                    del queues[tenant]


def overflow() -> Overloaded:
    """The refusal of a request for which there is no room."""
    error = Overloaded("Model is overloaded")
    error.retry_after_s = OVERFLOW_RETRY_AFTER_S
    return error


def over_share() -> OverShare:
    """The refusal of a request whose place went to a caller with fewer."""
    error = OverShare("Other callers wait too, and this one has its share of the queue.")
    error.retry_after_s = OVERFLOW_RETRY_AFTER_S
    return error


FAILED = "The model cannot be started."
TOO_DEAR = "The model cannot be started: no machine for it is known to cost at most its max_price_per_hour."


def unavailable(reason: str) -> Unavailable:
    """The refusal of a request whose deployment does not start."""
    error = Unavailable(reason)
    error.retry_after_s = EXPIRED_RETRY_AFTER_S
    return error
