"""Limits the requests in flight, in total and per tenant. Checked before the body is decoded."""

from __future__ import annotations

from collections import Counter
from contextlib import contextmanager
from typing import TYPE_CHECKING

from inference.errors import Overloaded, OverShare, ShuttingDown

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


class Admission:
    """Counts permits; never queues."""

    def __init__(self, max_concurrent_requests: int, max_requests_per_tenant: int = 0) -> None:
        """`max_requests_per_tenant` limits one tenant's permits; 0 means three quarters of all."""
        self.max_concurrent_requests = max_concurrent_requests
        self.max_requests_per_tenant = max_requests_per_tenant or max(1, max_concurrent_requests * 3 // 4)
        self.in_flight = 0
        self.draining = False
        self.on_refused: Callable[[], None] = lambda: None
        """Called for every request that is refused because too many are in flight."""
        self._by_tenant: Counter[str] = Counter()

    @property
    def crowded(self) -> bool:
        """Whether any tenant may be refused at the moment."""
        return self.draining or self.in_flight >= min(self.max_requests_per_tenant, self.max_concurrent_requests)

    def check(self, tenant: str = "") -> None:
        """Raise Overloaded, OverShare or ShuttingDown if `permit` would; acquires nothing."""
        if self.draining:
            raise ShuttingDown("The server is shutting down.")
        if self.in_flight >= self.max_concurrent_requests:
            self.on_refused()
            raise Overloaded("Model is overloaded")
        if tenant and self._by_tenant[tenant] >= self.max_requests_per_tenant:
            self.on_refused()
            raise OverShare("Too many requests of this caller are running; others are served.")

    @contextmanager
    def permit(self, tenant: str = "") -> Iterator[None]:
        """Acquire a permit for the duration of a request; raises as `check` does.

        The anonymous tenant "" has no limit of its own.
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
