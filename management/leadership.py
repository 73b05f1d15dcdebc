"""The leader's lease: of any number of reconcilers one acts. The lease is a row, timed by the database's clock.

A holder renews at a third of the lease's duration and stops acting at two thirds without a renewal, by its own monotonic
clock, so it has stopped before another can take over. Each take-over raises the epoch. The leader's writes check the epoch
in their transaction (`fence`), so a process that was suspended while it led changes nothing afterwards. A holder that cannot
reach the database keeps its epoch: as far as it knows nobody else leads.
"""

from __future__ import annotations

import hashlib
import os
import secrets
import socket
import time
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

import psutil
from django.db import connection, transaction

from management.models import LeaderLease

TTL_S = 10.0
RENEW_AFTER_S = TTL_S / 3
ACT_FOR_S = TTL_S * 2 / 3
BOOT_ID, NAMESPACE = Path("/proc/sys/kernel/random/boot_id"), Path("/proc/self/ns/pid")
CLOCKS = {
    "postgresql": "extract(epoch from clock_timestamp())",
    "sqlite": "((julianday('now') - 2440587.5) * 86400.0)",
}
"""The database's clock in Unix seconds, by vendor."""


class LeadershipLost(Exception):
    """Another process leads: nothing was written."""


def new_holder() -> str:
    """A name of this process that no other process has: the host's name, the process, where it can be looked up, and chance."""
    return f"{socket.gethostname()[:60]}:{os.getpid()}:{process_space()}:{secrets.token_hex(4)}"


@cache
def process_space() -> str:
    """What two processes share that know each other by process id: the machine's boot, and the PID namespace. Host names do not
    say so, because machines and containers may have equal ones. Empty where the system does not tell.
    """
    try:
        boot = BOOT_ID.read_text().strip()
        return hashlib.sha256(f"{boot} {NAMESPACE.stat().st_ino}".encode()).hexdigest()[:16]
    except OSError:
        return ""


def current_leader(name: str = "reconciler") -> str | None:
    """The holder of the lease at the moment, or None. Raises `django.db.Error`."""
    table = connection.ops.quote_name(LeaderLease._meta.db_table)
    with connection.cursor() as cursor:
        now = CLOCKS[connection.vendor]
        cursor.execute(f"select holder from {table} where name = %s and expires_at > {now}", [name])
        row = cursor.fetchone()
    return None if row is None else str(row[0])


@dataclass(slots=True)
class Leadership:
    """The part of one process in the election. Methods that reach the database raise `django.db.Error`."""

    name: str = "reconciler"
    holder: str = field(default_factory=new_holder)
    epoch: int = 0
    """0 while another process leads, or none does."""
    _renewed: float = 0.0

    @property
    def leads(self) -> bool:
        """Whether this process may act now. One that has an epoch and may not act has not reached the database for a while."""
        return self.epoch > 0 and time.monotonic() - self._renewed < ACT_FOR_S

    @property
    def due(self) -> bool:
        """Whether `campaign` should be called: to renew in time, or to try to take over."""
        return self.epoch == 0 or time.monotonic() - self._renewed >= RENEW_AFTER_S

    def campaign(self) -> bool:
        """Acquire or renew the lease; returns whether this process leads."""
        asked = time.monotonic()  # before the statement: the lease may be counted as shorter, never as longer
        now = CLOCKS[connection.vendor]
        table = connection.ops.quote_name(LeaderLease._meta.db_table)
        statement = f"""
            insert into {table} (name, holder, epoch, expires_at) values (%s, %s, 1, {now} + %s)
            on conflict (name) do update set
              epoch = case when {table}.holder = excluded.holder and {table}.expires_at > {now}
                      then {table}.epoch else {table}.epoch + 1 end,
              holder = excluded.holder,
              expires_at = excluded.expires_at
            where {table}.holder = excluded.holder or {table}.expires_at <= {now}
            returning epoch
        """
        with connection.cursor() as cursor:
            cursor.execute(statement, [self.name, self.holder, TTL_S])
            row = cursor.fetchone()
        if row is None:
            self.epoch = 0
            return False
        self.epoch, self._renewed = int(row[0]), asked
        return True

    def bury(self) -> None:
        """End the lease of a holder on this machine whose process has ended, so that nobody waits for it to run out."""
        row = LeaderLease.objects.filter(name=self.name).first()
        if row is None:
            return
        *_, pid, space, _ = row.holder.rsplit(":", 3)  # an earlier version wrote three parts, which are nobody here
        if space and space == process_space() and not psutil.pid_exists(int(pid)):
            LeaderLease.objects.filter(name=self.name, holder=row.holder, epoch=row.epoch).update(expires_at=0.0)

    def fence(self) -> None:
        """Check, inside the transaction of a write, that this process still leads; raises LeadershipLost."""
        row = LeaderLease.objects.select_for_update().filter(name=self.name).first()
        if row is None or (row.holder, row.epoch) != (self.holder, self.epoch):
            self.epoch = 0
            raise LeadershipLost(f"the lease is held by {row.holder if row else 'nobody'}")

    def resign(self) -> None:
        """Let another process take over at once."""
        if not self.epoch:
            return
        with transaction.atomic():
            self.epoch, epoch = 0, self.epoch
            rows = LeaderLease.objects.filter(name=self.name, holder=self.holder, epoch=epoch)
            rows.update(expires_at=0.0)
