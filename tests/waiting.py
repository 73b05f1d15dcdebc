"""Waits for an event that nothing tells of: look, and look again until a deadline. No test sleeps for a guessed time."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

PATIENCE_S = 60.0


def wait_until(
    condition: Callable[[], object],
    timeout_s: float = PATIENCE_S,
    explain: Callable[[], object] = lambda: "",
    every_s: float = 0.05,
) -> None:
    """Until `condition()` holds; what `explain()` says is shown where it does not come to that."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"not within {timeout_s} s; {explain()}"
        time.sleep(every_s)


async def eventually(
    condition: Callable[[], object], timeout_s: float = PATIENCE_S, explain: Callable[[], object] = lambda: ""
) -> None:
    """As `wait_until`, while the event loop goes on."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"not within {timeout_s} s; {explain()}"
        await asyncio.sleep(0.002)
