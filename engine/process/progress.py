"""What this process is doing and whether it moves on, told by a thread of its own.

A step may take minutes (a long prompt on few cores) and a kernel is compiled for seconds, so silence of the step loop is
no sign of a hang. The signs are: a process whose thread cannot even report, and work that has not moved on for far longer
than such work takes. Whoever started the process decides what follows from them; nothing here ends anything.
"""

from __future__ import annotations

import threading
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

REPORT_EVERY_S = 1.0
PATIENCE_S = 20.0
"""The least time after which work that does not move on is taken for hung."""
COMPILING_PATIENCE_S = 600.0
PATIENCE_FACTOR = 10.0
"""So many times as long as expected may work take, on a machine that others keep busy."""


class Pulse(msgspec.Struct):
    """What a report says: what is being done, for how many seconds it has not moved on, how many of them are no cause for
    alarm. Seconds in which the process itself stood still (a stopped process, a sleeping machine) do not count.
    """

    doing: str
    quiet_s: float
    patience_s: float


class Progress:
    """One for each process. Whoever works calls `begin` and `moved`, which cost as much as an assignment."""

    def __init__(self) -> None:
        self.doing = "starting"
        self.moves = 0
        self.patience_s = PATIENCE_S

    def begin(self, doing: str, expected_s: float = 0.0) -> None:
        """From now on the process does this; it should move on within `expected_s`."""
        self.doing = doing
        self.patience_s = max(PATIENCE_S, PATIENCE_FACTOR * expected_s)
        self.moves += 1

    def moved(self) -> None:
        """A part of the work is done."""
        self.moves += 1

    @contextmanager
    def compiling(self, what: str) -> Iterator[None]:
        """A kernel is compiled in the block, which may take long and shows no parts."""
        before = self.doing, self.patience_s
        self.doing, self.patience_s = f"compiling {what}", COMPILING_PATIENCE_S
        try:
            yield
        finally:
            self.doing, self.patience_s = before
            self.moves += 1


progress = Progress()
"""This process's own."""


class Pace:
    """How long a part of a step takes, by the slowest of the steps so far, older ones weighing less and less."""

    def __init__(self, parts: int) -> None:
        """A step moves on in so many equal parts: a model's layers."""
        self._parts = parts
        self._token_s = 0.0

    def learn(self, tokens: int, elapsed_s: float) -> None:
        """A step of so many tokens took so long."""
        self._token_s = max(elapsed_s / max(1, tokens), 0.9 * self._token_s)

    def expected_s(self, tokens: int) -> float:
        """A part of a step of so many tokens. One that reads all weights for a single token makes this long for many."""
        return self._token_s * tokens / self._parts


class Reporter:
    """Calls `report` about once a second from a thread of its own, until it is stopped."""

    def __init__(self, report: Callable[[Pulse], None]) -> None:
        self._report = report
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="reporter", daemon=True)

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def stop(self) -> None:
        """Report no more; returns when the last report is out."""
        self._stopped.set()
        self._thread.join()

    def _run(self) -> None:
        moves, quiet_s, last = -1, 0.0, time.monotonic()
        while not self._stopped.wait(REPORT_EVERY_S):
            now = time.monotonic()
            # A pause between two reports that is longer than it should be is the process's own sleep.
            quiet_s += min(now - last, 2 * REPORT_EVERY_S)
            last = now
            if progress.moves != moves:
                moves, quiet_s = progress.moves, 0.0
            self._report(Pulse(progress.doing, quiet_s, progress.patience_s))
