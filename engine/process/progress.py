"""Progress reports of a worker, sent by a thread of their own.

A step may take minutes (a long prompt on few cores) and a kernel seconds to compile, so a silent step loop is not a
hang. A worker hangs if its process sends no reports, or if its work has made no progress for far longer than such work
takes. The launcher's side decides what to do; nothing here ends a process.
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
"""The least number of seconds without progress before a worker counts as hung."""
STARTING_PATIENCE_S = 180.0
"""PATIENCE_S while libraries are imported: an import reports no progress, and may wait for a slow disk or a busy machine."""
COMPILING_PATIENCE_S = 600.0
PATIENCE_FACTOR = 10.0
"""Factor over the expected time before a worker counts as hung; other processes may keep the machine busy."""


class Pulse(msgspec.Struct):
    """One report: `doing` (the current activity), `quiet_s` (seconds without progress) and `patience_s` (seconds
    without progress that are normal). Time in which the process was suspended (stopped, or the machine asleep) does not
    count.
    """

    doing: str
    quiet_s: float
    patience_s: float


class Progress:
    """The progress of this process. The working code calls `begin` and `moved`, which cost as little as
    an assignment.
    """

    def __init__(self) -> None:
        self.doing = "starting"
        self.moves = 0
        self.patience_s = STARTING_PATIENCE_S

    def begin(self, doing: str, expected_s: float = 0.0) -> None:
        """Start an activity, which should report progress within `expected_s`."""
        self.doing = doing
        self.patience_s = max(PATIENCE_S, PATIENCE_FACTOR * expected_s)
        self.moves += 1

    def moved(self) -> None:
        """Report progress: a part of the work is done."""
        self.moves += 1

    @contextmanager
    def compiling(self, what: str) -> Iterator[None]:
        """Mark the block as compiling a kernel, which may take long and reports no progress."""
        before = self.doing, self.patience_s
        self.doing, self.patience_s = f"compiling {what}", COMPILING_PATIENCE_S
        try:
            yield
        finally:
            self.doing, self.patience_s = before
            self.moves += 1


progress = Progress()
"""The progress of this process."""


class Reports:
    """The order of a worker's reports, which two threads write: once it is ready, no report says "loading" again. Whoever
    reads them would take the worker back, and nothing would say "ready" a second time.
    """

    def __init__(self, report: Callable[..., None]) -> None:
        """`report` takes a state and its details."""
        self._report = report
        self._ready = False
        self._lock = threading.Lock()

    def beat(self, pulse: Pulse) -> None:
        """Report progress: "loading" before `ready`, "alive" afterwards."""
        with self._lock:
            self._report("alive" if self._ready else "loading", **msgspec.structs.asdict(pulse))

    def ready(self, model: object) -> None:
        """Report that the worker is ready; `model` are the model's facts."""
        with self._lock:
            self._ready = True
            self._report("ready", model=model)


class Pace:
    """Estimates the duration of a part of a step: a decaying maximum over past steps."""

    def __init__(self, parts: int) -> None:
        """`parts`: the number of equal parts of a step that report progress, which are a model's layers."""
        self._parts = parts
        self._token_s = 0.0

    def learn(self, tokens: int, elapsed_s: float) -> None:
        """Record the duration of a step of `tokens` tokens."""
        self._token_s = max(elapsed_s / max(1, tokens), 0.9 * self._token_s)

    def expected_s(self, tokens: int) -> float:
        """Expected seconds for one part of a step of `tokens` tokens. Steps of a single token make the estimate high,
        because they read all weights for one token.
        """
        return self._token_s * tokens / self._parts


class Reporter:
    """Calls `report` about once a second from a separate thread, until it is stopped."""

    def __init__(self, report: Callable[[Pulse], None]) -> None:
        self._report = report
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="reporter", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def stop(self) -> None:
        """Stop reporting; returns after the last report."""
        self._stopped.set()
        self._thread.join()

    def _run(self) -> None:
        moves, quiet_s, last = -1, 0.0, time.monotonic()
        while not self._stopped.wait(REPORT_EVERY_S):
            now = time.monotonic()
            # A longer pause between two reports means that the process was suspended.
            quiet_s += min(now - last, 2 * REPORT_EVERY_S)
            last = now
            if progress.moves != moves:
                moves, quiet_s = progress.moves, 0.0
            self._report(Pulse(progress.doing, quiet_s, progress.patience_s))
