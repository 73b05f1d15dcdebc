"""The load of a worker in outstanding tokens: a token to prefill counts 1, a token to generate counts DECODE_COST.

How long an output becomes is not known; it is expected from the tenant's earlier ones.
"""

from __future__ import annotations

from collections import OrderedDict

DECODE_COST = 4
PRIOR_TOKENS = 256
"""The expected output of a tenant without earlier ones."""
LEARNING = 0.1
"""The weight of the last output in the moving average."""
OVERDUE = 4
"""A sequence never counts less than this fraction (1/4) of its expected output, for it runs until it ends."""
MAX_TENANTS = 4096


class ExpectedLengths:
    """The moving average of output lengths per tenant of a deployment; tenants that are long gone are forgotten."""

    def __init__(self) -> None:
        self._averages: OrderedDict[str, float] = OrderedDict()

    def expect(self, tenant: str, max_tokens: int) -> int:
        """The tokens that an output of this tenant will have, at most `max_tokens`."""
        return min(max_tokens, max(1, round(self._averages.get(tenant, PRIOR_TOKENS))))

    def learn(self, tenant: str, produced: int) -> None:
        """An output of this tenant ended with so many tokens."""
        before = self._averages.get(tenant)
        self._averages[tenant] = produced if before is None else before + LEARNING * (produced - before)
        self._averages.move_to_end(tenant)
        if len(self._averages) > MAX_TENANTS:
            self._averages.popitem(last=False)


def outstanding(uncached: int, expected: int, produced: int, max_tokens: int) -> int:
    """The load of one sequence: `uncached` prompt tokens that are still to be prefilled, and the rest of its output."""
    rest = max(expected - produced, expected // OVERDUE)
    return uncached + DECODE_COST * max(0, min(rest, max_tokens - produced))


def combined(own: int, foreign_requests: int, mean_request: float) -> float:
    """The load of a worker: this process's exact count, and other processes' requests in the worker's last report,
    each as large as this process's requests are on average.
    """
    return own + foreign_requests * mean_request
