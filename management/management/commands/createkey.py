"""`manage.py createkey NAME`: make an API key and print it, once."""

from __future__ import annotations

from typing import Any

from django.core.management.base import BaseCommand, CommandError, CommandParser

from management.models.access import SCOPES
from management.services.errors import RegistryError
from management.services.keys import create_key


class Command(BaseCommand):
    """The key is stored as a hash and cannot be shown again."""

    help = __doc__

    def add_arguments(self, parser: CommandParser) -> None:
        """A name, and what the key may do."""
        parser.add_argument("name")
        parser.add_argument("--scope", action="append", choices=SCOPES, help="May be repeated; the default is infer.")

    def handle(self, *args: Any, **options: Any) -> None:
        """Make it."""
        try:
            _, text = create_key(options["name"], options["scope"] or ["infer"], "command line")
        except RegistryError as error:
            raise CommandError(str(error)) from error
        self.stdout.write(text)
