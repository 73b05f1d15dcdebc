"""Order by priority, the smaller first, then by arrival. The last running request is preempted first."""

from __future__ import annotations

from bisect import insort
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from engine.policies.base import Policy
    from engine.request import Request


class Priority:
    """Has no state, because the lists are sorted."""

    def insert(self, request: Request, requests: list[Request]) -> None:
        insort(requests, request, key=lambda r: (r.priority, r.arrival))

    def startable(self, waiting: Sequence[Request], running: Sequence[Request]) -> Iterable[Request]:
        return waiting

    def served(self, requests: Sequence[Request], num_tokens: Sequence[int]) -> None:
        pass  # what a request has got so far does not matter

    def yields(
        self,
        waiting: Sequence[Request],
        running: Sequence[Request],
        max_running: int,
        able: Callable[[Request], bool],
    ) -> list[Request]:
        return []  # who runs keeps its place until it ends

    def victim(self, running: Sequence[Request]) -> Request:
        return running[-1]


ENTRY: type[Policy] = Priority
