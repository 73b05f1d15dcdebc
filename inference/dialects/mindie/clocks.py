"""The times of a generation: those that MindIE reports, and those that end it."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING

from inference.dialects.mindie.errors import CallbackTimeout
from inference.generation.ending import EndCause

if TYPE_CHECKING:
    from inference.dialects.mindie.settings import MindieSettings
    from inference.generation.generation import Generation


class Clock:
    """Token arrival times in milliseconds, as MindIE reports them."""

    def __init__(self, generation: Generation) -> None:
        self._generation, self._last, self._first_ms = generation, 0.0, 0
        self.prefill_ms: int | None = None
        self.decode_ms: int | None = None
        self.decodes: list[int] = []
        self.batch_sizes: list[int] = []
        self.waits_us: list[int] = []

    @property
    def first_ms(self) -> int:
        """What the first token took."""
        return self._first_ms

    @property
    def step_ms(self) -> int:
        """What the last step took: to the first token, or since the one before."""
        return next((spent_ms for spent_ms in (self.prefill_ms, self.decode_ms) if spent_ms is not None), 0)

    @property
    def batch_size(self) -> int:
        """The batch of the last step, 0 before any."""
        return self.batch_sizes[-1] if self.batch_sizes else 0

    @property
    def wait_us(self) -> int:
        """The queue time before the last step, 0 before any."""
        return self.waits_us[-1] if self.waits_us else 0

    def resume(self, first_ms: int, decodes: list[int], batch_sizes: list[int], waits_us: list[int]) -> None:
        """Go on from the times of an earlier instance."""
        self._first_ms, self._last = first_ms, time.monotonic()
        self.decodes, self.batch_sizes, self.waits_us = [*decodes], [*batch_sizes] or [1], [*waits_us] or [0]

    def tick(self) -> None:
        """Record a step."""
        now = time.monotonic()
        if self.prefill_ms is None and not self.batch_sizes:
            self.prefill_ms = self._first_ms = round((now - self._generation.timings.submitted) * 1e3)
            self.waits_us.append(round(self._generation.timings.queue_s * 1e6))
        else:
            self.prefill_ms, self.decode_ms = None, round((now - self._last) * 1e3)
            self.decodes.append(self.decode_ms)
            self.waits_us.append(0)  # a running sequence has no queue time
        self.batch_sizes.append(self._generation.batch_size)
        self._last = now


class Timers:
    """MindIE's three timers of a generation, on one loop handle; a token costs one clock reading."""

    def __init__(
        self, generation: Generation, timeout_s: int | None, settings: MindieSettings, spent_s: float = 0
    ) -> None:
        """`timeout_s`: the client's, between two tokens; `spent_s`: what it has taken elsewhere."""
        self._generation, self._loop = generation, asyncio.get_running_loop()
        now = self._loop.time()
        self._end = (now + settings.e2e_timeout_s - spent_s, "server e2eTimeout")
        self._between = (float(settings.token_timeout_s), "server tokenTimeout")
        if timeout_s is not None:
            self._between = min(self._between, (float(timeout_s), "client timeout"))
        self._last = now
        self._expired: str | None = None
        self._handle = self._loop.call_at(self._next[0], self._look)

    def token(self) -> None:
        """Record a token; raises CallbackTimeout if a timer ended the generation."""
        self._last = self._loop.time()
        if self._expired is not None:
            raise CallbackTimeout(self._expired)

    def close(self) -> None:
        """Cancel the timers."""
        self._handle.cancel()

    @property
    def _next(self) -> tuple[float, str]:
        return min(self._end, (self._last + self._between[0], self._between[1]))

    def _look(self) -> None:
        at, which = self._next
        if self._loop.time() < at:
            self._handle = self._loop.call_at(at, self._look)
            return
        self._expired = which
        self._generation.cancel(EndCause.DEADLINE)
