"""What is written down of what the reconciler saw."""

from __future__ import annotations

from management.ledger import Ledger, Observed
from management.services.deployments import start_deployment


def test_what_was_seen_of_an_earlier_start_is_not_written(deployment):
    start_deployment(deployment, "tester")
    ledger = Ledger()
    (row,) = ledger.read().deployments
    for generation, expected in ((row.generation - 1, ("inactive", "")), (row.generation, ("failed", "no memory"))):
        ledger.observed[row.pk] = Observed(generation, "failed", "no memory")
        ledger.write()
        deployment.refresh_from_db()
        assert (deployment.state, deployment.reason) == expected
