"""Says in the log that connections are refused because the process has no file descriptors left: Twisted closes them, and
tells only its own log, which nobody reads.
"""

from __future__ import annotations

import time
from typing import Any

import structlog
from twisted.internet import tcp
from twisted.logger import globalLogPublisher

EVERY_S = 10.0
"""Seconds between two warnings at least."""
NAMESPACE = tcp.Port._logger.namespace
FULL = "EMFILE encountered"
"""How the text of Twisted's event begins."""
logger = structlog.get_logger(__name__)


class DescriptorWarning:
    """An observer of Twisted's log."""

    def __init__(self) -> None:
        self._told_at = -EVERY_S

    def __call__(self, event: dict[str, Any]) -> None:
        """Called with every event of Twisted's log."""
        if event.get("log_namespace") != NAMESPACE or not str(event.get("log_format")).startswith(FULL):
            return
        now = time.monotonic()
        if now - self._told_at >= EVERY_S:
            self._told_at = now
            logger.error(
                "connections are refused: no file descriptor is left; raise the limit of open files (ulimit -n)"
            )


def warn_of_descriptors() -> None:
    """Begin to warn; once for the process."""
    globalLogPublisher.addObserver(DescriptorWarning())
