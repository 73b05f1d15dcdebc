"""Logging for every Django process: structlog on top of the standard library, to stderr.

The event loop never waits for the reader of the log: see `engine.process.log_writer`.
"""

from __future__ import annotations

import atexit
import logging
import sys

import structlog
from structlog.typing import EventDict, Processor, WrappedLogger

from engine.process.log_writer import LogHandler, LogWriter, printable


def dropped_lines() -> int:
    """The number of lines for the log or standard output that were dropped because the reader was too slow."""
    return sum(stream.dropped for stream in (sys.stderr, sys.stdout) if isinstance(stream, LogWriter))


def configure(log_format: str, level: int = logging.INFO) -> None:
    """`log_format` is "console" for people or "json" for machines.

    Replaces both standard streams, so that other writers (tracebacks of threads, libraries) cannot block either.
    """
    errors, output = LogWriter(sys.stderr), LogWriter(sys.stdout)
    sys.stderr, sys.stdout = errors, output
    atexit.register(output.drain)
    atexit.register(errors.drain)
    shared: list[Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
    ]
    colours = sys.stderr.isatty()
    renderer = (
        structlog.processors.JSONRenderer()
        if log_format == "json"
        else structlog.dev.ConsoleRenderer(
            colors=colours,
            exception_formatter=structlog.dev.plain_traceback,  # other formatters print local variables, including keys
        )
    )
    structlog.configure(
        processors=[*shared, structlog.stdlib.ProcessorFormatter.wrap_for_formatter],
        logger_factory=structlog.stdlib.LoggerFactory(),
        cache_logger_on_first_use=True,
    )
    handler = LogHandler(errors)
    last: list[Processor] = [
        structlog.stdlib.ProcessorFormatter.remove_processors_meta,
        structlog.processors.format_exc_info,
        renderer,
    ]
    if log_format == "console":
        last[1] = _printable  # the console renderer formats exceptions itself
    handler.setFormatter(structlog.stdlib.ProcessorFormatter(foreign_pre_chain=shared, processors=last))
    logging.basicConfig(level=level, handlers=[handler], force=True)
    for noisy in ("daphne", "twisted", "asyncio", "django.db"):
        logging.getLogger(noisy).setLevel(logging.WARNING)


def _printable(_: WrappedLogger, __: str, event: EventDict) -> EventDict:
    """A processor: no text of a line has control characters."""
    return {name: printable(value) if isinstance(value, str) else value for name, value in event.items()}
