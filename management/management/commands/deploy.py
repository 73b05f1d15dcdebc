"""`deploy`: register a model, or take a registered one, and start a deployment of it."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from django.conf import settings
from django.core.management.base import CommandParser
from django.db import IntegrityError, transaction

from management.autoscale.config import Strategy
from management.management.deployment_command import ACTOR, DeploymentCommand, is_active
from management.management.deployment_fields import add_fields, fields_of, option, pair
from management.models import Deployment, Model, ModelVersion
from management.services.adapters import read_adapter, register_adapter
from management.services.deployments import create_deployment, one_after_the_other, start_deployment
from management.services.discovery import register_beside
from management.services.errors import RegistryConflict, RegistryError
from management.services.models import register_model

if TYPE_CHECKING:
    from collections.abc import Callable

ATTEMPTS = 3
"""Transactions until one finds its names free: others may take them in between."""


class Command(DeploymentCommand):
    """`manage.py deploy MODEL [--name NAME] [--min-workers 0 --max-workers 4 --scale-to-zero] [--option NAME=VALUE]`."""

    help = __doc__

    def add_arguments(self, parser: CommandParser) -> None:
        """Add the model and the deployment's fields."""
        super().add_arguments(parser)
        parser.add_argument(
            "model", nargs="?", help="A registered model's name, a directory or a hub id. Default: DRAGOMAN_MODEL."
        )
        parser.add_argument("--name", help="The deployment's name; the default is the model's.")
        parser.add_argument("--embedding", action="store_true", help="The model makes embeddings.")
        parser.add_argument(
            "--keep", action="store_true", help="If there is a deployment of this name, leave it as it is."
        )
        parser.add_argument(
            "--from-settings", action="store_true", help="Take the engine options of the settings, as `serve` does."
        )
        add_fields(parser)
        parser.add_argument(
            "--adapter", action="append", default=[], metavar="NAME=DIRECTORY", help="An adapter; may be repeated."
        )

    def change(self, options: dict[str, Any]) -> tuple[Deployment, Callable[[Deployment], bool]]:
        """Register, create and start; nothing stays if anything is refused."""
        source = options["model"] or settings.MODEL
        if options["keep"]:
            name = options["name"] or _model_name(source)
            kept = Deployment.objects.filter(name=name, deleted=False).first()
            if kept is not None:
                return kept, is_active
        kind = str(Model.Kind.EMBEDDING if options["embedding"] else Model.Kind.LLM)
        fields = fields_of(options)
        if options["embedding"]:
            fields.setdefault("strategy", Strategy.RPS.value)
        if "max_workers" not in fields and "min_workers" in fields:
            fields["max_workers"] = max(1, fields["min_workers"])
        adapters = [pair(text, "adapter") for text in options["adapter"]]
        # Files are copied before the transaction, so that no lock is held meanwhile.
        stored = {name: read_adapter(str(Path(directory).expanduser().resolve()), None) for name, directory in adapters}
        engine_options = dict(settings.ENGINE_OPTIONS) if options["from_settings"] else {}
        engine_options |= dict(option(text) for text in options["option"])

        def write() -> Deployment:
            one_after_the_other()  # before the model's row is locked
            version = _version(source, kind)
            name = options["name"] or version.model.name
            deployment = create_deployment(name, version, ACTOR, engine_options, inference_kind=kind, **fields)
            for adapter, directory in adapters:
                register_adapter(adapter, deployment, directory, ACTOR, stored[adapter])
            start_deployment(deployment, ACTOR, max(1, deployment.min_workers))
            return deployment

        deployment = _written(write)
        register_beside(deployment, ACTOR)
        return deployment, is_active


def _written(write: Callable[[], Deployment]) -> Deployment:
    """What `write` makes in one transaction. Raises RegistryError, or RegistryConflict if other calls take the names again and again."""
    for _ in range(ATTEMPTS):
        with suppress(IntegrityError), transaction.atomic():  # another call took a name after the check
            return write()
    raise RegistryConflict("name: other calls took the names of the deployment, its model or its adapters; try again")


def _version(source: str, kind: str) -> ModelVersion:
    """The default version of a registered model of this name, or of a newly registered one. Raises RegistryError."""
    known = ModelVersion.objects.filter(model__name=source, is_default=True).first()
    if known is not None:
        return known
    path = Path(source).expanduser()
    if "://" not in source and not path.is_dir() and (source.startswith((".", "/", "~")) or source.count("/") > 1):
        raise RegistryError(f"model: {source}: the directory does not exist")
    return register_model(_model_name(source), str(path.resolve()) if path.is_dir() else source, ACTOR, kind)


def _model_name(source: str) -> str:
    """The name of a model from this source: the directory's, or the hub id."""
    path = Path(source).expanduser()
    return path.resolve().name if path.is_dir() else source
