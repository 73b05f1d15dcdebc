"""How many requests may be inside at once, and whether any may enter. Asked before the body is worked on."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

from inference.errors import Overloaded, ShuttingDown

if TYPE_CHECKING:
    from collections.abc import Iterator


class Admission:
    """A counter with a limit; it never queues."""

    def __init__(self, max_concurrent_requests: int) -> None:
        self.max_concurrent_requests = max_concurrent_requests
        self.inside = 0
        self.draining = False

    @contextmanager
    def place(self) -> Iterator[None]:
        """One place for the duration of a request; raises Overloaded or ShuttingDown when there is none."""
        if self.draining:
            raise ShuttingDown("The server is shutting down.")
        if self.inside >= self.max_concurrent_requests:
            raise Overloaded("Model is overloaded")
        self.inside += 1
        try:
            yield
        finally:
            self.inside -= 1
