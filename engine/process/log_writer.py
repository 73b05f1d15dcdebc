"""A log that never makes its writers wait: lines go through a bounded buffer and a thread to their stream.

What reads the stream may stand still: the buffer fills, further lines are dropped and counted, and a line tells how
many once there is room again. It never raises for a stream that is gone.
"""

from __future__ import annotations

import io
import logging
import os
import select
import sys
import threading
import time
from collections import deque
from typing import TextIO

MAX_CHARACTERS = 1 << 20
"""Kept for a reader that stands still."""
LAST_WORDS_S = 1.0
"""How long a process that ends waits for its last lines to be read."""


class LogWriter(io.TextIOBase):
    """Stands in for a text stream; `write` takes no longer than adding to a list.

    `write` may be called from any thread. What is written in one call appears whole or not at all.
    """

    def __init__(self, stream: TextIO, max_characters: int = MAX_CHARACTERS) -> None:
        self._stream, self._most = stream, max_characters
        self._texts: deque[str] = deque()
        self._held = 0
        self._changed = threading.Condition()
        self._busy = False
        self._unreported = 0
        self.dropped = 0
        """Texts that found no room since the start."""
        threading.Thread(target=self._run, name="log", daemon=True).start()

    @property
    def encoding(self) -> str:  # type: ignore[override]
        """The stream's own."""
        return self._stream.encoding

    def fileno(self) -> int:
        """The stream's own."""
        return self._stream.fileno()

    def isatty(self) -> bool:
        """Whether a person reads."""
        return self._stream.isatty()

    def writable(self) -> bool:
        """Always."""
        return True

    def write(self, text: str) -> int:
        """Take the text, or drop it when there is no room."""
        with self._changed:
            if self._held + len(text) > self._most:
                self.dropped += 1
                self._unreported += 1
            else:
                self._texts.append(text)
                self._held += len(text)
                self._changed.notify_all()
        return len(text)

    def flush(self) -> None:
        """Nothing: the thread flushes what it writes."""

    def drain(self, timeout_s: float = LAST_WORDS_S) -> None:
        """Wait until everything has been written, at most so long; for a process that is about to end."""
        deadline = time.monotonic() + timeout_s
        with self._changed:
            while (self._texts or self._busy) and (left := deadline - time.monotonic()) > 0:
                self._changed.wait(left)

    def _run(self) -> None:
        while True:
            with self._changed:
                self._busy = False
                self._changed.notify_all()
                while not self._texts:
                    self._changed.wait()
                texts, self._busy = "".join(self._texts), True
                self._texts.clear()
                # The text that is being written still counts: it is in memory until it has been read.
            self._put(texts)
            with self._changed:
                self._held -= len(texts)
                lost, self._unreported = self._unreported, 0
            if lost:
                self._put(f"{lost} log lines were dropped: nobody read the log.\n")

    def _put(self, text: str) -> None:
        """Past the stream's own buffer, whose lock would be held while nobody reads and the interpreter ends."""
        data, descriptor = text.encode(errors="backslashreplace"), self._stream.fileno()
        while data:
            try:
                data = data[os.write(descriptor, data) :]
            except BlockingIOError:  # whoever shares the pipe made it non-blocking
                select.select([], [descriptor], [])
            except OSError:  # the reader is gone for good; there is nowhere left to say so
                return


class LogHandler(logging.StreamHandler[LogWriter]):
    """A handler that writes each record in one call, and waits for the last of them when logging ends."""

    def emit(self, record: logging.LogRecord) -> None:
        """As StreamHandler."""
        try:
            self.stream.write(self.format(record) + self.terminator)
        except Exception:  # as logging asks of handlers: a bad record must not end what logged it
            self.handleError(record)

    def close(self) -> None:
        """Called when the process ends."""
        self.stream.drain()
        super().close()


def configure() -> None:
    """The log of a worker's process: everything that it says goes to standard error through a LogWriter."""
    writer = LogWriter(sys.stderr)
    sys.stderr = writer
    form = "%(asctime)s %(levelname)s engine %(message)s"
    logging.basicConfig(level=logging.INFO, format=form, handlers=[LogHandler(writer)])
