"""Create an API key and print it. Only its hash is stored, so it cannot be shown again."""

from __future__ import annotations

from typing import Any

from django.core.management.base import BaseCommand, CommandError, CommandParser

from management.models.access import SCOPES
from management.services.errors import RegistryError
from management.services.keys import create_key


class Command(BaseCommand):
    """`manage.py createkey NAME [--scope SCOPE ...]`."""

    help = __doc__

    def add_arguments(self, parser: CommandParser) -> None:
        """Add the name and the scopes."""
        parser.add_argument("name", help="A name for the key, shown in the admin.")
        parser.add_argument(
            "--scope", action="append", choices=SCOPES, help="What the key allows; may be repeated. Default: infer."
        )

    def handle(self, *args: Any, **options: Any) -> None:
        """Create the key; raises CommandError."""
        try:
            _, text = create_key(options["name"], options["scope"] or ["infer"], "command line")
        except RegistryError as error:
            raise CommandError(str(error)) from error
        self.stdout.write(text)
