"""How many connections are open, by the address that they were made to."""

from __future__ import annotations

from collections import Counter
from functools import partial
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from inference.server.channel import DeadlineChannel


class OpenConnections:
    """Admits connections up to a limit for each address: a flood of one plane does not shut the others."""

    def __init__(self) -> None:
        self._open: Counter[Any] = Counter()

    @property
    def total(self) -> int:
        """The number for all addresses."""
        return self._open.total()

    def admit(self, channel: DeadlineChannel, most: int, host: Any) -> bool:
        """Count a new connection to `host`, Twisted's address of this side, until the channel leaves it; False if there are too many."""
        address = getattr(host, "port", None) or getattr(host, "name", None)
        if self._open[address] >= most:
            return False
        self._open[address] += 1
        channel.when_lost = partial(self._lost, address)
        return True

    def _lost(self, address: Any) -> None:
        self._open[address] -= 1
