"""One leads; who has lost the lease writes nothing."""

from __future__ import annotations

import os

import pytest
from django.db import connection, transaction

from management import leadership
from management.leadership import Leadership, LeadershipLost
from management.models import LeaderLease

pytestmark = pytest.mark.django_db


def expire() -> None:
    LeaderLease.objects.update(expires_at=0.0)


def test_it_works():
    first, second = Leadership(), Leadership()
    assert not first.leads
    assert first.campaign()
    assert (first.leads, first.epoch) == (True, 1)
    assert not second.campaign()
    assert not second.leads


def test_a_renewal_keeps_the_epoch_and_a_take_over_raises_it():
    first, second = Leadership(), Leadership()
    first.campaign()
    assert (first.campaign(), first.epoch) == (True, 1)
    expire()
    assert (second.campaign(), second.epoch) == (True, 2)
    assert not first.campaign()
    assert first.epoch == 0


def test_a_lease_that_ran_out_unnoticed_is_a_new_one():
    only = Leadership()
    only.campaign()
    expire()
    assert (only.campaign(), only.epoch) == (True, 2)


def test_who_resigns_lets_the_next_one_lead_at_once():
    first, second = Leadership(), Leadership()
    first.campaign()
    first.resign()
    assert not first.leads
    assert second.campaign()


def test_a_leader_that_was_suspended_stops_acting_before_another_can_take_over(monkeypatch):
    first = Leadership()
    first.campaign()
    now = leadership.time.monotonic()
    assert leadership.ACT_FOR_S < leadership.TTL_S
    monkeypatch.setattr(leadership.time, "monotonic", lambda: now + leadership.ACT_FOR_S)
    assert not first.leads
    assert first.due


def test_the_writes_of_an_earlier_leader_are_refused():
    first, second = Leadership(), Leadership()
    first.campaign()
    with transaction.atomic():
        first.fence()
    expire()
    second.campaign()
    with pytest.raises(LeadershipLost), transaction.atomic():
        first.fence()
    assert first.epoch == 0


def test_the_clock_is_the_databases():
    assert connection.vendor in leadership.CLOCKS


def test_the_lease_of_a_dead_process_of_this_machine_is_not_waited_for():
    dead = Leadership(holder=leadership.new_holder().replace(f":{os.getpid()}:", ":999999999:"))
    dead.campaign()
    alive = Leadership()
    assert not alive.campaign()
    alive.bury()
    assert (alive.campaign(), alive.epoch) == (True, 2)
    other = Leadership()
    other.bury()
    assert not other.campaign()  # this one lives


@pytest.mark.parametrize("space", ["", "of-another-machine"])
def test_a_process_that_cannot_be_looked_up_here_is_waited_for(space):
    """Machines and containers may have equal host names, and other processes."""
    host = leadership.new_holder().partition(":")[0]
    dead = Leadership(holder=f"{host}:999999999:{space}:chance")
    dead.campaign()
    other = Leadership()
    other.bury()
    assert not other.campaign()


def test_a_holder_of_an_earlier_version_is_waited_for():
    dead = Leadership(holder="host:999999999:chance")
    dead.campaign()
    other = Leadership()
    other.bury()
    assert not other.campaign()
