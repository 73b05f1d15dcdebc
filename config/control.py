"""The control plane's part in a serving process: the embedded reconciler of `serve`, or the follower of `web`."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Protocol

import structlog
from django.db import Error as DatabaseError
from django.db import close_old_connections

from management.database_errors import one_line
from management.follower import RegistryFollower
from management.launchers import LAUNCHERS
from management.leadership import Leadership, new_holder
from management.load_reporter import LoadReporter
from management.reconcile import Reconciler
from management.snapshot import SnapshotHolder

if TYPE_CHECKING:
    from collections.abc import Callable

    from config.options import Options
    from management.ledger import Observed
    from management.load import LoadSource
    from management.models import Deployment

    Loop = Callable[[threading.Event], None]

logger = structlog.get_logger(__name__)


class RegistryLed(Exception):
    """Another process leads this registry's reconciliation."""


class Control(Protocol):
    """What a serving process needs of the control plane."""

    holder: SnapshotHolder
    process: str
    """A name that no other process has."""
    shares_ports: bool
    """Whether other processes may serve the same ports."""

    def registry_reachable(self) -> bool:
        """Whether the database could be used when it was last tried. Thread-safe."""
        ...

    def refresh(self) -> None:
        """Read the registries and publish a snapshot. Thread-safe; raises `django.db.Error`."""
        ...

    def observed(self, row: Deployment) -> Observed:
        """A deployment's observed state. Thread-safe."""
        ...

    def failure(self) -> tuple[str, str] | None:
        """Name and reason of a deployment that should run and has failed, or None."""
        ...

    def start(self, load: LoadSource, *loops: Loop) -> None:
        """Begin. `load` is measured at this process's front door; `loops` get threads of their own until the end. Raises
        `django.db.Error` or RegistryLed.
        """
        ...

    def hurry(self) -> None:
        """A request waits for a deployment to wake: tell whoever wakes it now. Thread-safe."""
        ...

    def stop(self) -> None:
        """End; returns when everything has."""
        ...


class EmbeddedControl:
    """The reconciler in this process. Its workers end with it."""

    shares_ports = False

    def __init__(self, options: Options) -> None:
        self.holder = SnapshotHolder()
        self.process = new_holder()
        self._launcher = LAUNCHERS[options.launcher](None, options.network)
        self._reconciler = Reconciler(self._launcher, self.holder, str(options.data_dir), log_format=options.log_format)
        self._stop = threading.Event()
        self._threads: list[threading.Thread] = []
        self.refresh = self._reconciler.refresh
        self.observed = self._reconciler.observed
        self.failure = self._reconciler.failure

    def start(self, load: LoadSource, *loops: Loop) -> None:
        """Take the lease, forget the workers of an earlier process, run the first pass and then the loop."""
        leadership = Leadership(holder=self.process)
        leadership.bury()
        if not leadership.campaign():
            raise RegistryLed("a reconciler runs on this registry; use `web` instead of `serve`, or stop it")
        self._reconciler.load = load
        self._reconciler.ledger.standing = leadership
        self._reconciler.ledger.forget_earlier_workers()
        self._reconciler.reconcile_once()  # the worker loads its model while the rest starts
        reporter = LoadReporter(self.process, load)
        self._threads = _started(self._stop, self._reconciler.run, *loops, reporter.run)

    def registry_reachable(self) -> bool:
        """As the reconciler's loop has found it."""
        return self._reconciler.ledger.reachable

    def hurry(self) -> None:
        """Nothing: the reconciler looks at the load in every pass."""

    def stop(self) -> None:
        """End the loop and the workers, and record that they are gone; if the database is away, the next start does it."""
        self._stop.set()
        for thread in self._threads:
            thread.join()
        self._launcher.close()
        standing = self._reconciler.ledger.standing
        if standing is None:  # it never began
            return
        close_old_connections()
        if not standing.epoch:  # the workers in the rows are another's
            return
        try:
            self._reconciler.ledger.forget_earlier_workers()
            standing.resign()
        except DatabaseError as error:
            logger.warning("database not reachable", error=one_line(error))


class FollowingControl:
    """A web process beside reconcilers in other processes."""

    shares_ports = True

    def __init__(self) -> None:
        self.holder = SnapshotHolder()
        self.process = new_holder()
        self._follower = RegistryFollower(self.holder)
        self._reporter: LoadReporter | None = None
        self._stop = threading.Event()
        self._threads: list[threading.Thread] = []
        self.refresh = self._follower.refresh
        self.observed = self._follower.observed
        self.failure = self._follower.failure

    def start(self, load: LoadSource, *loops: Loop) -> None:
        """Read the registries once, then follow them."""
        self._follower.refresh()
        self._reporter = LoadReporter(self.process, load)
        self._threads = _started(self._stop, self._follower.run, *loops, self._reporter.run)

    def registry_reachable(self) -> bool:
        """As the follower has found it."""
        return self._follower.reachable

    def hurry(self) -> None:
        """Report the load to the reconciler now."""
        if self._reporter is not None:
            self._reporter.hurry()

    def stop(self) -> None:
        """End the threads."""
        self._stop.set()
        for thread in self._threads:
            thread.join()


def _started(stop: threading.Event, *loops: Loop) -> list[threading.Thread]:
    """Threads that run these loops until `stop` is set."""
    threads = [threading.Thread(target=loop, args=(stop,)) for loop in loops]
    for thread in threads:
        thread.start()
    return threads
