"""Workers of removed deployments, which whoever removed them may wait for."""

from __future__ import annotations

import pytest
from django.utils import timezone

from config.registry import count_leftovers, remove
from management.models import Worker
from management.services.deployments import delete_deployment
from management.services.errors import RegistryConflict


@pytest.mark.parametrize(
    ("state", "counted"),
    [("starting", 1), ("loading", 1), ("ready", 1), ("draining", 1), ("exited", 0), ("failed", 0)],
)
def test_workers_that_have_not_ended(deployment, state, counted):
    Worker.objects.create(deployment=deployment, version=deployment.version, index=0, epoch=1, state=state,
                          started_at=timezone.now())  # fmt: skip
    assert count_leftovers(deployment.name) == 0  # it is not removed
    delete_deployment(deployment, "tester")
    assert count_leftovers(deployment.name) == counted
    assert count_leftovers("another") == 0


def test_one_of_several_removes_a_deployment(deployment):
    remove(deployment, "one")
    with pytest.raises(RegistryConflict):
        remove(deployment, "another")  # which read it before
