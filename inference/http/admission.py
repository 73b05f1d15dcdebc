"""How many requests may be inside at once, and whether any may enter. Asked before the body is worked on."""

from __future__ import annotations

from collections import Counter
from contextlib import contextmanager
from typing import TYPE_CHECKING

from inference.errors import Overloaded, ShuttingDown

if TYPE_CHECKING:
    from collections.abc import Iterator


class Admission:
    """A counter with a limit; it never queues."""

    def __init__(self, max_concurrent_requests: int, max_requests_per_tenant: int = 0) -> None:
        """Of all places one tenant may hold `max_requests_per_tenant`; 0 is three quarters."""
        self.max_concurrent_requests = max_concurrent_requests
        self.max_requests_per_tenant = max_requests_per_tenant or max(1, max_concurrent_requests * 3 // 4)
        self.in_flight = 0
        self.draining = False
        self._by_tenant: Counter[str] = Counter()

    @property
    def crowded(self) -> bool:
        """Whether `check` may refuse anybody."""
        return self.draining or self.in_flight >= min(self.max_requests_per_tenant, self.max_concurrent_requests)

    def check(self, tenant: str = "") -> None:
        """Raises Overloaded or ShuttingDown where `place` would; takes nothing."""
        if self.draining:
            raise ShuttingDown("The server is shutting down.")
        if self.in_flight >= self.max_concurrent_requests:
            raise Overloaded("Model is overloaded")
        if tenant and self._by_tenant[tenant] >= self.max_requests_per_tenant:
            raise Overloaded("Model is overloaded")

    @contextmanager
    def permit(self, tenant: str = "") -> Iterator[None]:
        """One place for the duration of a request; raises Overloaded or ShuttingDown when there is none.

        Who is nobody in particular, "", shares with nobody.
        """
        self.check(tenant)
        self.in_flight += 1
        if tenant:
            self._by_tenant[tenant] += 1
        try:
            yield
        finally:
            self.in_flight -= 1
            if tenant:
                self._by_tenant[tenant] -= 1
                if not self._by_tenant[tenant]:
                    del self._by_tenant[tenant]
