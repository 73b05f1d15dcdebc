"""`scale`: ask for a number of workers, for one more (`up`), or for none (`zero`)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from django.core.management.base import CommandParser

from management.management.deployment_command import ACTOR, DeploymentCommand, find, has_no_workers
from management.models import Deployment, Worker
from management.services.deployments import scale_up, start_deployment, stop_deployment
from management.services.errors import RegistryError

if TYPE_CHECKING:
    from collections.abc import Callable


class Command(DeploymentCommand):
    """`manage.py scale NAME (NUMBER | up | zero)`."""

    help = __doc__

    def add_arguments(self, parser: CommandParser) -> None:
        """Add the name and the number."""
        super().add_arguments(parser)
        parser.add_argument("name", help="The deployment's name or id.")
        parser.add_argument("workers", help="A number, `up` or `zero`.")

    def change(self, options: dict[str, Any]) -> tuple[Deployment, Callable[[Deployment], bool]]:
        """Ask for the workers."""
        deployment, text = find(options["name"]), options["workers"]
        if text == "up":
            scale_up(deployment, ACTOR)
        elif text in ("zero", "0"):
            stop_deployment(deployment, ACTOR)
            return deployment, has_no_workers
        elif text.isdigit():
            start_deployment(deployment, ACTOR, int(text))
        else:
            raise RegistryError(f"workers: a number, up or zero is expected, got {text!r}")
        return deployment, has_asked_workers


def has_asked_workers(deployment: Deployment) -> bool:
    """Whether as many workers are ready as were asked for."""
    ready = deployment.workers.filter(state=Worker.State.READY).count()
    return deployment.observed_generation == deployment.generation and ready == deployment.replicas
