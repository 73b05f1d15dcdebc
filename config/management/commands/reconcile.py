"""`reconcile`: run the workers of the registered deployments until SIGTERM or Ctrl-C.

Of any number of these processes one leads, and another takes over when it ends. The workers outlive them by their lease.
"""

from __future__ import annotations

import signal
import threading
from typing import Any

import structlog
from django.core.management.base import BaseCommand, CommandError
from django.db import Error as DatabaseError
from django.db import close_old_connections
from pydantic import ValidationError

from config import faults, logs
from config.options import Options, get_options
from config.preparation import prepare_registry
from config.refusals import registry_refused, start_refused
from engine.network.credentials import CredentialsError
from engine.process.precautions import write_no_core
from management.database_errors import one_line
from management.launchers import LAUNCHERS
from management.launchers.base import LauncherError
from management.leadership import Leadership
from management.ledger import Ledger
from management.reconcile import Reconciler
from management.snapshot import SnapshotHolder
from management.stored_loads import StoredLoads

logger = structlog.get_logger(__name__)


class Command(BaseCommand):
    """Runs a reconciler."""

    help = __doc__

    def handle(self, *args: Any, **options: Any) -> None:
        settings = get_options()
        logs.configure(settings.log_format)
        faults.arm()
        write_no_core()
        try:
            prepare_registry(settings.data_dir)
            reconciler = make_reconciler(settings)
        except DatabaseError as error:
            raise CommandError(registry_refused(error, settings.data_dir, settings.database_url)) from error
        except (ValidationError, CredentialsError, LauncherError, OSError) as error:
            raise CommandError(start_refused(error)) from error
        stop = threading.Event()
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: stop.set())
        logger.info("reconciler started")
        reconciler.run(stop)
        close_old_connections()
        if reconciler.ledger.leadership is not None:
            try:
                reconciler.ledger.leadership.resign()
            except DatabaseError as error:
                logger.warning("the lease runs out by itself", error=one_line(error))


def make_reconciler(settings: Options) -> Reconciler:
    """A reconciler that acts while it leads, and whose workers outlive it. Raises OSError or LauncherError."""
    loads = StoredLoads()
    return Reconciler(
        LAUNCHERS[settings.launcher](settings.shared_dir(), settings.network),
        SnapshotHolder(),
        str(settings.data_dir),
        load=loads,
        lease_s=settings.worker_lease_s,
        log_format=settings.log_format,
        ledger=Ledger(leadership=Leadership(), loads=loads),
    )
