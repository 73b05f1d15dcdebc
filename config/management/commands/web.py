"""`web`: serve the registered deployments until SIGTERM or Ctrl-C. Reconcilers in other processes run the workers.

Any number of these processes may share one set of ports: each takes the listening sockets of those that run already.
"""

from __future__ import annotations

import sys
from typing import Any

from django.core.management.base import BaseCommand, CommandError
from django.db import Error as DatabaseError
from pydantic import ValidationError

from config import faults, logs
from config.options import get_options
from config.refusals import registry_refused, start_refused
from inference import dialects
from inference.planes.declaration import SetupError
from inference.server.tls import TlsError


class Command(BaseCommand):
    """Runs a web process."""

    help = __doc__

    def handle(self, *args: Any, **options: Any) -> None:
        settings = get_options()
        logs.configure(settings.log_format)
        faults.arm()
        from config.control import FollowingControl
        from config.server import Server

        try:
            declared = dialects.declared_dialects()
            setups = [dialect.set_up(settings) for dialect in declared]
            status = Server(settings, declared, setups, FollowingControl()).run()
        except DatabaseError as error:
            raise CommandError(registry_refused(error, settings.data_dir, settings.database_url)) from error
        except (SetupError, TlsError, ValidationError, ValueError, OSError) as error:
            raise CommandError(start_refused(error)) from error
        sys.exit(status)
