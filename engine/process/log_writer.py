"""Non-blocking log output: lines go through a bounded buffer to a writer thread.

If the reader of the stream stalls and the buffer is full, further lines are dropped and counted, and a line reports
their number once the stream is read again. A closed stream raises nothing.
"""

from __future__ import annotations

import io
import json
import logging
import os
import select
import sys
import threading
import time
from collections import deque
from datetime import UTC, datetime
from typing import Any, TextIO

MAX_CHARACTERS = 1 << 20
"""Characters that are buffered while the reader stalls."""
LAST_WORDS_S = 1.0
"""Seconds that a process waits at its end for its last lines to be written."""


class LogWriter(io.TextIOBase):
    """Replaces a text stream; `write` only appends to a buffer.

    `write` may be called from any thread. The text of one call is written completely or dropped completely.
    """

    def __init__(self, stream: TextIO, max_characters: int = MAX_CHARACTERS) -> None:
        self._stream, self._most = stream, max_characters
        self._texts: deque[str] = deque()
        self._held = 0
        self._changed = threading.Condition()
        self._busy = False
        self._unreported = 0
        self.dropped = 0
        """The number of dropped texts since the start."""
        threading.Thread(target=self._run, name="log", daemon=True).start()

    @property
    def encoding(self) -> str:  # type: ignore[override]
        """The encoding of the stream."""
        return self._stream.encoding

    def fileno(self) -> int:
        """The file descriptor of the stream."""
        return self._stream.fileno()

    def isatty(self) -> bool:
        """Whether the stream is a terminal."""
        return self._stream.isatty()

    def writable(self) -> bool:
        """Always True."""
        return True

    def write(self, text: str) -> int:
        """Buffer the text, or drop it if the buffer is full."""
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
        """Do nothing: the writer thread does not buffer."""

    def drain(self, timeout_s: float = LAST_WORDS_S) -> None:
        """Wait until everything has been written, at most `timeout_s`; called when the process ends."""
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
                # The text that is being written still counts towards the limit: it is in memory until it is written.
            self._put(texts)
            with self._changed:
                self._held -= len(texts)
                lost, self._unreported = self._unreported, 0
            if lost:
                self._put(f"{lost} log lines were dropped: nobody read the log.\n")

    def _put(self, text: str) -> None:
        """Write to the file descriptor. The stream's buffer is bypassed, because its lock would block the interpreter's
        exit while the reader stalls.
        """
        data, descriptor = text.encode(errors="backslashreplace"), self._stream.fileno()
        while data:
            try:
                data = data[os.write(descriptor, data) :]
            except BlockingIOError:  # another process that shares the pipe made it non-blocking
                select.select([], [descriptor], [])
            except OSError:  # the reader has closed the stream, so there is nowhere to report it
                return


def printable(text: str) -> str:
    """The text with control characters, line separators and terminal sequences written as escapes, so that what a client named
    can neither begin a line of the log nor colour one.
    """
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


class LogHandler(logging.StreamHandler[LogWriter]):
    """A handler that writes each record in one call, and waits for the last records when logging ends."""

    def emit(self, record: logging.LogRecord) -> None:
        """Write the record and its terminator in one call."""
        try:
            self.stream.write(self.format(record) + self.terminator)
        except Exception:  # as logging asks of handlers: a bad record must not end what logged it
            self.handleError(record)

    def close(self) -> None:
        """Wait for the last records; called when logging shuts down."""
        self.stream.drain()
        super().close()


class ConsoleFormatter(logging.Formatter):
    """One line for each record, and the traceback of an exception below it."""

    def formatMessage(self, record: logging.LogRecord) -> str:
        """The line, with a printable message."""
        record.message = printable(record.message)
        return super().formatMessage(record)


class JsonFormatter(logging.Formatter):
    """One JSON object for each record, with the same keys as the server's own lines."""

    def __init__(self, worker_id: str) -> None:
        super().__init__()
        self._worker_id = worker_id

    def format(self, record: logging.LogRecord) -> str:
        """The record as JSON."""
        line: dict[str, Any] = {
            "worker": self._worker_id,
            "event": record.getMessage(),
            "level": record.levelname.lower(),
            "timestamp": datetime.fromtimestamp(record.created, UTC).isoformat().replace("+00:00", "Z"),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line)


def configure(log_format: str, worker_id: str) -> None:
    """Configure the log of a worker process: log and standard error go to standard error through a LogWriter. `log_format` is
    "console" or "json".
    """
    writer = LogWriter(sys.stderr)
    sys.stderr = writer
    handler = LogHandler(writer)
    form = "%(asctime)s %(levelname)s engine %(message)s"
    handler.setFormatter(JsonFormatter(worker_id) if log_format == "json" else ConsoleFormatter(form))
    logging.basicConfig(level=logging.INFO, handlers=[handler])
