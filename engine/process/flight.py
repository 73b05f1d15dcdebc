"""The flight recorder: what the engine's last steps were, kept in memory and written to a file when something is wrong.

A record has times and counts, never tokens or texts. The file has JSON lines: first a header with the cause and the stack of every thread,
then one line for each step, the oldest first. It is written when the step loop ends by an error, when work makes no progress
for too long, and on SIGUSR2. A thread of its own waits for the signal, so that a loop that hangs can be asked too.
"""

from __future__ import annotations

import json
import logging
import os
import re
import signal
import sys
import threading
import time
import traceback
from collections import deque
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engine.process.progress import progress

if TYPE_CHECKING:
    from types import FrameType

logger = logging.getLogger(__name__)

FOLDER = "flight"
"""The recordings' folder below the data folder."""
SIGNAL = signal.SIGUSR2
STEPS = 1 << 14
"""Steps that are kept: minutes of a busy worker, in about 4 MB."""
FILES = 20
"""Recordings that are kept in a folder; a worker that crashes again and again does not fill the disk."""
MAX_FRAMES = 60


class Cause(StrEnum):
    """Why a recording was written."""

    CRASH = "crash"
    """The step loop ended by an error."""
    HANG = "hang"
    """Work made no progress for far longer than such work takes."""
    ASKED = "asked"
    """Somebody sent the signal."""


@dataclass(slots=True)
class StepRecord:
    """One step. `begin` is in monotonic seconds; `elapsed_s` is None while it runs, and if it failed. The gauges are those at its
    launch; `preemptions` counts since the worker's start.
    """

    begin: float
    sequences: int
    prompt_tokens: int
    decode_tokens: int
    running: int
    waiting: int
    preemptions: int
    blocks_used: int
    elapsed_s: float | None = None
    finished: int = 0
    failed: bool = False


class FlightRecorder:
    """The records of this process. `add` costs as little as an append."""

    def __init__(self, steps: int = STEPS) -> None:
        self._records: deque[StepRecord] = deque(maxlen=steps)
        self._folder: Path | None = None
        self._worker, self._epoch = "", 0
        self._hangs = False
        self._writing = threading.Lock()

    def open(self, folder: str, worker_id: str, epoch: int) -> None:
        """Name the worker, and the folder of its recordings; "": none are written."""
        self._folder = Path(folder) if folder else None
        self._worker, self._epoch = worker_id, epoch

    def add(self, record: StepRecord) -> None:
        """Keep a step that was launched; its last fields are set later."""
        self._records.append(record)

    def watch(self, hangs: bool) -> None:
        """Called with every progress report; writes a recording when the work begins to hang."""
        if hangs and not self._hangs:
            self.write(Cause.HANG)
        self._hangs = hangs

    def answer_signals(self) -> None:
        """Write a recording on each SIGNAL, from a thread; the signal must be blocked in all threads."""
        threading.Thread(target=self._wait, name="flight", daemon=True).start()

    def write(self, cause: Cause, error: BaseException | None = None) -> Path | None:
        """Write a recording; None if it cannot be written, which the log then says. Thread-safe."""
        if self._folder is None:
            return None
        with self._writing:
            try:
                path = self._write(self._folder, cause, error)
            except OSError as failure:
                logger.warning("the flight recording was not written: %s", failure)
                return None
        logger.info("flight recording written: %s", path)
        return path

    def _wait(self) -> None:
        while True:
            signal.sigwait({SIGNAL})
            self.write(Cause.ASKED)

    def _write(self, folder: Path, cause: Cause, error: BaseException | None) -> Path:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        now = datetime.now(UTC)
        path = folder / f"{stem(self._worker, self._epoch)}-{now:%Y%m%dT%H%M%S.%fZ}-{cause}.jsonl"
        unfinished = path.with_suffix(".part")
        try:
            with os.fdopen(os.open(unfinished, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600), "w") as file:
                for line in self._lines(now, cause, error):
                    file.write(json.dumps(line) + "\n")
            unfinished.rename(path)
        except OSError:
            unfinished.unlink(missing_ok=True)
            raise
        _keep_newest(folder)
        return path

    def _lines(self, now: datetime, cause: Cause, error: BaseException | None) -> list[dict[str, Any]]:
        # A copy is made in one piece, while the loop may go on.
        records, clock = self._records.copy(), now.timestamp() - time.monotonic()
        header: dict[str, Any] = {
            "worker": self._worker,
            "epoch": self._epoch,
            "process": os.getpid(),
            "cause": cause,
            "at": _time(now.timestamp()),
            "doing": progress.doing,
            "steps": len(records),
            "threads": _threads(),
        }
        if error is not None:  # its text might quote what a client sent
            header |= {"error": type(error).__name__, "raised": _places(traceback.extract_tb(error.__traceback__))}
        steps = []
        for record in records:
            fields = asdict(record)
            begin, elapsed_s = fields.pop("begin"), fields.pop("elapsed_s")
            ms = None if elapsed_s is None else round(elapsed_s * 1e3, 3)
            steps.append({"at": _time(begin + clock), "ms": ms, **fields})
        return [header, *steps]


def stem(worker_id: str, epoch: int) -> str:
    """The beginning of the names of a worker's recordings."""
    return f"{re.sub(r'[^A-Za-z0-9._-]', '-', worker_id)}-{epoch}"


def block_signal() -> None:
    """Block SIGNAL in this thread and in those that it starts; to be called before any of them."""
    signal.pthread_sigmask(signal.SIG_BLOCK, {SIGNAL})


def _time(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="milliseconds")


def _threads() -> dict[str, list[str]]:
    """Where each thread is, the innermost call last."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    return {names.get(ident, str(ident)): _stack(frame) for ident, frame in sys._current_frames().items()}


def _stack(frame: FrameType) -> list[str]:
    return _places(traceback.StackSummary.extract(traceback.walk_stack(frame), limit=MAX_FRAMES, lookup_lines=False))[
        ::-1
    ]


def _places(stack: traceback.StackSummary) -> list[str]:
    return [f"{place.filename}:{place.lineno} {place.name}" for place in stack]


def _keep_newest(folder: Path) -> None:
    """Remove the oldest recordings, as far as other workers of the folder have not been faster."""
    found: list[tuple[int, Path]] = []
    for path in folder.glob("*.jsonl"):
        with suppress(OSError):
            found.append((path.stat().st_mtime_ns, path))
    for _, path in sorted(found)[:-FILES]:
        with suppress(OSError):
            path.unlink()


recorder = FlightRecorder()
"""The recorder of this process."""
