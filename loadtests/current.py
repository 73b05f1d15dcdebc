"""The stage that this process is in, as the master's message has said."""

from __future__ import annotations

from typing import Any

import msgspec
from gevent.event import Event
from gevent.pool import Group

from loadtests.plan import Stage
from loadtests.samples import Collection
from loadtests.settings import Addresses

STAGE_MESSAGE = "stage"


class Order(msgspec.Struct, frozen=True):
    """What a master tells its workers at the beginning of a stage."""

    stage: Stage
    addresses: Addresses
    rate_per_user: float = 0.0
    """Requests per second that each user of an open loop sends."""


class Current:
    """One a process."""

    def __init__(self) -> None:
        self.collection = Collection()
        self.pending: Any = Group()
        """Requests of open loops, which outlive their users."""
        self._order: Order | None = None
        self._known = Event()

    def begin(self, order: Order) -> None:
        """Enter a stage."""
        self._order = order
        self._known.set()

    def hear(self, msg: Any, **_: Any) -> None:
        """Locust's listener for the master's message."""
        self.begin(msgspec.convert(msg.data, Order))

    def order(self) -> Order:
        """What to do; waits for the first stage."""
        self._known.wait()
        assert self._order is not None
        return self._order


CURRENT = Current()
