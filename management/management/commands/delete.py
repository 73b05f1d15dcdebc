"""`delete`: delete a deployment; its workers finish their requests first."""

from __future__ import annotations

from typing import TYPE_CHECKING

from management.management.deployment_command import ACTOR, EndingCommand
from management.services.deployments import delete_deployment

if TYPE_CHECKING:
    from management.models import Deployment


class Command(EndingCommand):
    """`manage.py delete NAME [--force]`."""

    help = __doc__

    def end(self, deployment: Deployment, force: bool) -> None:
        """Ask the service."""
        delete_deployment(deployment, ACTOR, force)
