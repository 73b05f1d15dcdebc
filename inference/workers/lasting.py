"""Work that a request begins and that must come to its end also if the client leaves."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, TypeVar

import structlog

if TYPE_CHECKING:
    from collections.abc import Coroutine

logger = structlog.get_logger(__name__)
T = TypeVar("T")


class LastingTasks:
    """Tasks that outlive the requests which began them, until the server drains."""

    def __init__(self) -> None:
        self._left: set[asyncio.Task[Any]] = set()
        """Those whose requests are over: nothing else keeps them."""
        self._ending = False

    async def run(self, work: Coroutine[Any, Any, T]) -> T:
        """The result of `work`, which goes on if the caller is cancelled, unless the server drains."""
        task = asyncio.ensure_future(work)
        try:
            await asyncio.wait({task})
        except asyncio.CancelledError:
            self._left.add(task)
            task.add_done_callback(self._ended)
            if self._ending:
                task.cancel()
            raise
        return task.result()

    def end(self) -> None:
        """Cancel what no request waits for any more, and from now on what a request leaves."""
        self._ending = True
        for task in self._left:
            task.cancel()

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._left.discard(task)
        error = None if task.cancelled() else task.exception()
        if error is not None:
            logger.warning("failed after its client had left", reason=str(error) or type(error).__name__)
