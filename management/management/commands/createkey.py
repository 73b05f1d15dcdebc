"""Create an API key and print it. Only its hash is stored, so it cannot be shown again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from django.core.management.base import BaseCommand, CommandError, CommandParser

from management.generated import generated
from management.models import ApiKey, Deployment
from management.models.access import SCOPES
from management.services.errors import RegistryError
from management.services.keys import create_key
from management.snapshot import KeyLimits

FILE_MODE = 0o640


class Command(BaseCommand):
    """`manage.py createkey NAME [--scope SCOPE ...] [--weight NUMBER] [--requests-per-minute N] ... [--deployment NAME]`."""

    help = __doc__

    def add_arguments(self, parser: CommandParser) -> None:
        """Add the name, the scopes, the limits and the deployment."""
        parser.add_argument("name", help="A name for the key, shown in the admin.")
        parser.add_argument(
            "--scope", action="append", choices=SCOPES, help="What the key allows; may be repeated. Default: infer."
        )
        parser.add_argument(
            "--weight", type=float, default=1.0, help="Its share of a busy server among other keys. Default: 1."
        )
        parser.add_argument("--requests-per-minute", type=int, default=0, help="Default: 0, any number.")
        parser.add_argument(
            "--tokens-per-minute", type=int, default=0, help="Of prompts and outputs. Default: 0, any number."
        )
        parser.add_argument("--tokens-per-day", type=int, default=0, help="The same for a day. Default: 0, any number.")
        parser.add_argument("--deployment", help="The only deployment whose inference the key opens. Default: all.")
        parser.add_argument(
            "--file",
            type=Path,
            help="Write the key to this file, which the owner's group may read, and print nothing. A file that holds a valid "
            "key of this name and these scopes is left as it is.",
        )

    def handle(self, *args: Any, **options: Any) -> None:
        """Create the key; raises CommandError."""
        deployment, name = None, options["deployment"]
        if name is not None:
            deployment = Deployment.objects.filter(name=name, deleted=False).first()
            if deployment is None:
                raise CommandError(f"there is no deployment {name}")
        scopes, file = options["scope"] or ["infer"], options["file"]
        if file is not None and _holds_key(file, options["name"], scopes, deployment):
            return
        try:
            limits = KeyLimits(*(options[field] for field in KeyLimits.__struct_fields__))
            _, text = create_key(options["name"], scopes, "command line", deployment=deployment, limits=limits)
        except RegistryError as error:
            raise CommandError(str(error)) from error
        if file is None:
            self.stdout.write(text)
            return
        try:
            file.unlink(missing_ok=True)
            generated(file, lambda: text, FILE_MODE)
        except OSError as error:
            raise CommandError(f"--file: {file} cannot be written: {error.strerror}") from error


def _holds_key(file: Path, name: str, scopes: list[str], deployment: Deployment | None) -> bool:
    """Whether the file holds a key that can be used, with this name, these scopes and this deployment."""
    try:
        text = file.read_text().strip()
        key = ApiKey.objects.get_from_key(text) if text else None
    except (FileNotFoundError, ApiKey.DoesNotExist):
        return False
    except OSError as error:
        raise CommandError(f"--file: {file} cannot be read: {error.strerror}") from error
    if key is None or key.revoked or key.has_expired:
        return False
    return (key.name, key.scopes, key.deployment) == (name, sorted(set(scopes)), deployment)
