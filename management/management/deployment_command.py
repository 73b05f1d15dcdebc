"""What the commands for deployments share: the lookup of a deployment, output for people or scripts, and waiting."""

from __future__ import annotations

import json
import time
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any

from django.core.management.base import BaseCommand, CommandError, CommandParser
from django.db import Error

from management.database_errors import with_advice
from management.models import Deployment
from management.services.errors import RegistryError

if TYPE_CHECKING:
    from collections.abc import Callable

ACTOR = "command line"
POLL_S = 0.5


class DeploymentCommand(BaseCommand, ABC):
    """A command that changes one deployment."""

    def add_arguments(self, parser: CommandParser) -> None:
        """Add what every such command has."""
        parser.add_argument("--json", action="store_true", help="Print the deployment as JSON.")
        parser.add_argument("--wait", type=float, metavar="SECONDS", help="Wait so long for the change to be done.")

    @abstractmethod
    def change(self, options: dict[str, Any]) -> tuple[Deployment, Callable[[Deployment], bool]]:
        """Make the change; returns the deployment and when it is done. Raises RegistryError."""

    def handle(self, *args: Any, **options: Any) -> None:
        """Change, wait if asked to, print; raises CommandError."""
        try:
            deployment, done = self.change(options)
            deployment.refresh_from_db()
            if options["wait"] is not None:
                self._wait(deployment, done, options["wait"], options["json"])
        except RegistryError as error:
            raise CommandError(str(error)) from error
        except Error as error:
            raise CommandError(f"the registry cannot be used: {with_advice(error)}") from error
        if options["json"]:
            shown = {
                "id": deployment.public_id,
                "name": deployment.name,
                "state": deployment.current_state,
                "reason": deployment.reason,
                "workers_wanted": deployment.target_workers,
            }
            self.stdout.write(json.dumps(shown))
        else:
            self.stdout.write(f"{deployment.name} is {deployment.current_state}. {deployment.reason}".rstrip())

    def _wait(self, deployment: Deployment, done: Callable[[Deployment], bool], timeout_s: float, quiet: bool) -> None:
        deadline, shown = time.monotonic() + timeout_s, ""
        while not done(deployment):
            progress = f"{deployment.current_state} {deployment.reason}".rstrip()
            if progress != shown and not quiet:
                self.stderr.write(progress)
            shown = progress
            if deployment.current_state == str(Deployment.State.FAILED):
                raise CommandError(f"{deployment.name} failed: {deployment.reason}")
            if time.monotonic() > deadline:
                raise CommandError(f"{deployment.name} is still {progress}")
            time.sleep(POLL_S)
            deployment.refresh_from_db()


class EndingCommand(DeploymentCommand):
    """A command after which the deployment has no workers."""

    def add_arguments(self, parser: CommandParser) -> None:
        """Add the name and the switch."""
        super().add_arguments(parser)
        parser.add_argument("name", help="The deployment's name or id.")
        parser.add_argument("--force", action="store_true", help="Do not wait for running requests.")

    @abstractmethod
    def end(self, deployment: Deployment, force: bool) -> None:
        """Ask for the end; raises RegistryError."""

    def change(self, options: dict[str, Any]) -> tuple[Deployment, Callable[[Deployment], bool]]:
        """Ask for the end; done when the last worker has left."""
        deployment = find(options["name"])
        self.end(deployment, options["force"])
        return deployment, has_no_workers


def find(name: str) -> Deployment:
    """The deployment of this name or public id. Raises RegistryError."""
    rows = Deployment.objects.filter(deleted=False)
    row = rows.filter(name=name).first() or rows.filter(public_id=name).first()
    if row is None:
        raise RegistryError(f"there is no deployment {name!r}")
    return row


def is_active(deployment: Deployment) -> bool:
    """Whether a worker is ready."""
    return deployment.current_state == str(Deployment.State.ACTIVE)


def has_no_workers(deployment: Deployment) -> bool:
    """Whether all workers have left."""
    rests = deployment.current_state in (str(Deployment.State.INACTIVE), str(Deployment.State.DELETED))
    return rests and not deployment.workers.filter(ended_at=None).exists()
