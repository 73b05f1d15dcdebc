"""`stop`: stop a deployment; its workers finish their requests first."""

from __future__ import annotations

from typing import TYPE_CHECKING

from management.management.deployment_command import ACTOR, EndingCommand
from management.services.deployments import stop_deployment

if TYPE_CHECKING:
    from management.models import Deployment


class Command(EndingCommand):
    """`manage.py stop NAME [--force]`."""

    help = __doc__

    def end(self, deployment: Deployment, force: bool) -> None:
        """Ask the service."""
        stop_deployment(deployment, ACTOR, force)
