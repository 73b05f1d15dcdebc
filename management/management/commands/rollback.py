"""`rollback`: serve an earlier version of an adapter again."""

from __future__ import annotations

from typing import Any

from django.core.management.base import BaseCommand, CommandError, CommandParser

from management.management.deployment_command import ACTOR
from management.models import Adapter
from management.services.adapters import roll_back
from management.services.errors import RegistryError


class Command(BaseCommand):
    """`manage.py rollback ADAPTER [--deployment DEPLOYMENT] [--to NUMBER]`."""

    help = __doc__

    def add_arguments(self, parser: CommandParser) -> None:
        """Add the adapter and the version."""
        parser.add_argument("adapter", help="The adapter's name.")
        parser.add_argument("--deployment", help="Its deployment; needed if several have an adapter of this name.")
        parser.add_argument(
            "--to", type=int, metavar="NUMBER", help="The version; the default is the one before the current."
        )

    def handle(self, *args: Any, **options: Any) -> None:
        """Roll back and print the version; raises CommandError."""
        found = Adapter.objects.filter(name=options["adapter"]).select_related("deployment")
        if options["deployment"]:
            found = found.filter(deployment__name=options["deployment"])
        rows = list(found)
        if len(rows) != 1:
            owners = ", ".join(row.deployment.name for row in rows)
            raise CommandError(
                f"name one with --deployment: {owners}" if rows else f"no adapter is named {options['adapter']}"
            )
        try:
            version = roll_back(rows[0], ACTOR, options["to"])
        except RegistryError as error:
            raise CommandError(str(error)) from error
        self.stdout.write(f"{rows[0].name} serves version {version.number}, from {version.source}")
