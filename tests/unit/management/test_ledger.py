"""What is written down of what the reconciler saw."""

from __future__ import annotations

import threading
from datetime import timedelta

import pytest
from django.db import OperationalError, connection
from django.utils import timezone
from structlog.testing import capture_logs

from management.ledger import KEEP_ENDED, Ledger, Observed
from management.models import Deployment, Worker
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


def test_an_error_of_several_lines_is_one_in_the_log(db):
    def step():
        raise OperationalError('connection to server at "db" failed: refused\n\tIs the server running?\n')

    with capture_logs() as lines:
        assert not Ledger()._attempt(step)
    assert [line["error"] for line in lines] == ['connection to server at "db" failed: refused; Is the server running?']


@pytest.mark.django_db(transaction=True)
@pytest.mark.parametrize("elsewhere", [False, True], ids=["by its own thread", "by another"])
def test_registries_are_read_again_only_after_a_write(django_assert_num_queries, deployment, elsewhere):
    def write() -> None:
        Deployment.objects.update(title="changed")
        if elsewhere:
            connection.close()

    ledger = Ledger()
    ledger.read_changes()
    with django_assert_num_queries(1):
        ledger.read_changes()
    if elsewhere:
        thread = threading.Thread(target=write)
        thread.start()
        thread.join()
    else:
        write()
    ledger.read_changes()
    assert [row.title for row in ledger.registries.deployments] == ["changed"]
    with django_assert_num_queries(1):
        ledger.read_changes()


def test_ended_workers_are_forgotten_after_a_week_but_not_their_epochs(deployment):
    now, long_ago = timezone.now(), timezone.now() - KEEP_ENDED - timedelta(minutes=1)
    for index, epoch, ended_at in (
        (0, 1, long_ago), (0, 2, long_ago), (0, 3, now), (1, 7, long_ago), (1, 8, long_ago), (2, 1, None), (2, 2, None),
    ):  # fmt: skip
        deployment.workers.create(version=deployment.version, index=index, epoch=epoch, ended_at=ended_at)
    ledger = Ledger()
    ledger.keep_house()
    assert sorted(Worker.objects.values_list("index", "epoch")) == [(0, 3), (1, 8), (2, 1), (2, 2)]
    ledger.forget_earlier_workers()
    assert [ledger.next_epoch(deployment.name, index) for index in (0, 1)] == [4, 9]
