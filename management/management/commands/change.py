"""`change`: give a deployment other scaling rules, engine options or another version of its model."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from django.core.management.base import CommandParser

from management.management.deployment_command import ACTOR, DeploymentCommand, find, is_active
from management.management.deployment_fields import add_fields, fields_of, option
from management.models import ModelVersion
from management.services.deployments import change_deployment
from management.services.errors import RegistryError

if TYPE_CHECKING:
    from collections.abc import Callable

    from management.models import Deployment


class Command(DeploymentCommand):
    """`manage.py change NAME [--max-workers 4] [--option NAME=VALUE] [--model-version NUMBER]`."""

    help = __doc__

    def add_arguments(self, parser: CommandParser) -> None:
        """Add the name and the fields."""
        super().add_arguments(parser)
        parser.add_argument("name", help="The deployment's name or id.")
        parser.add_argument("--model-version", type=int, help="Number of the version of its model to serve.")
        add_fields(parser)

    def change(self, options: dict[str, Any]) -> tuple[Deployment, Callable[[Deployment], bool]]:
        """Change what was given."""
        deployment = find(options["name"])
        fields = fields_of(options)
        if options["option"]:
            fields["engine_options"] = deployment.engine_options | dict(option(text) for text in options["option"])
        if options["model_version"] is not None:
            versions = ModelVersion.objects.filter(model=deployment.version.model, number=options["model_version"])
            if (version := versions.first()) is None:
                raise RegistryError(
                    f"model_version: {deployment.version.model} has no version {options['model_version']}"
                )
            fields["version"] = version
        change_deployment(deployment, ACTOR, **fields)
        return deployment, is_active
