"""`delete`: delete a deployment; its workers finish their requests first."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from django.core.management.base import CommandParser

from management.management.deployment_command import ACTOR, DeploymentCommand, find, has_no_workers
from management.services.deployments import delete_deployment

if TYPE_CHECKING:
    from collections.abc import Callable

    from management.models import Deployment


class Command(DeploymentCommand):
    """`manage.py delete NAME [--force]`."""

    help = __doc__

    def add_arguments(self, parser: CommandParser) -> None:
        """Add the name and the switch."""
        super().add_arguments(parser)
        parser.add_argument("name", help="The deployment's name or id.")
        parser.add_argument("--force", action="store_true", help="Do not wait for running requests.")

    def change(self, options: dict[str, Any]) -> tuple[Deployment, Callable[[Deployment], bool]]:
        """Delete the deployment."""
        deployment = find(options["name"])
        delete_deployment(deployment, ACTOR, options["force"])
        return deployment, has_no_workers
