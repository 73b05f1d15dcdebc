"""Revoke an API key. It stops working within a second, and this cannot be undone."""

from __future__ import annotations

from typing import Any

from django.core.management.base import BaseCommand, CommandError, CommandParser

from management.management.deployment_command import ACTOR
from management.services.errors import RegistryError
from management.services.keys import find_key, revoke_key


class Command(BaseCommand):
    """`manage.py revokekey NAME_OR_PREFIX`."""

    help = __doc__

    def add_arguments(self, parser: CommandParser) -> None:
        """Add the key."""
        parser.add_argument(
            "key", help="Its prefix, which is what stands before the point, or its name if it is the only one."
        )

    def handle(self, *args: Any, **options: Any) -> None:
        """Revoke the key; raises CommandError."""
        try:
            key = find_key(options["key"])
        except RegistryError as error:
            raise CommandError(str(error)) from error
        was_revoked = key.revoked
        revoke_key(key, ACTOR)
        self.stdout.write(f"{key.name} ({key.prefix}) {'was revoked before' if was_revoked else 'is revoked'}.")
