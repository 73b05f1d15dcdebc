"""Ends a generation whose next token does not come in time. Time in which its reader is slow does not count."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable


class StallWatch:
    """Calls `expired` once if `limit_s` pass between `waits` and `rests`; 0: never."""

    def __init__(self, limit_s: float, expired: Callable[[], None]) -> None:
        self._limit_s, self._expired = limit_s, expired
        self._since: float | None = None
        self._handle: asyncio.TimerHandle | None = None

    def waits(self) -> None:
        """From now on the next token is waited for."""
        if not self._limit_s:
            return
        loop = asyncio.get_running_loop()
        self._since = loop.time()
        if self._handle is None:  # one timer for all tokens: it looks again when it fires
            self._handle = loop.call_at(self._since + self._limit_s, self._look)

    def rests(self) -> None:
        """A token has come."""
        self._since = None

    def close(self) -> None:
        """Stop watching."""
        self.rests()
        if self._handle is not None:
            self._handle.cancel()

    def _look(self) -> None:
        loop = asyncio.get_running_loop()
        due = (loop.time() if self._since is None else self._since) + self._limit_s
        if self._since is not None and loop.time() >= due:
            self._expired()
        else:
            self._handle = loop.call_at(due, self._look)
