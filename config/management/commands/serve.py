"""`serve`: migrate, register and deploy the model, and serve it until SIGTERM or Ctrl-C."""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from django.core.management.base import BaseCommand, CommandError, CommandParser
from django.db import Error as DatabaseError
from pydantic import ValidationError

from config import faults, logs
from config.installation import DEMO_ADAPTERS, DEMO_MODEL
from config.options import Options, get_options
from config.preparation import prepare_registry
from config.refusals import registry_refused, start_refused
from config.serve_flags import add_flags, engine_options, unapplied
from inference import dialects
from inference.planes.declaration import SetupError
from inference.server.tls import TlsError
from management.models import Deployment
from management.services.adapters import register_adapter, remove_adapter
from management.services.deployments import (
    change_deployment,
    create_deployment,
    make_default,
    start_deployment,
    stop_deployment,
)
from management.services.discovery import register_beside
from management.services.errors import RegistryError
from management.services.models import register_model

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from inference.planes.declaration import Setup

ACTOR = "serve"


class Command(BaseCommand):
    """Runs the whole server."""

    help = __doc__

    def create_parser(self, prog_name: str, subcommand: str, **kwargs: Any) -> CommandParser:
        """Flags are not abbreviated: `apply_flags` would not know them."""
        return super().create_parser(prog_name, subcommand, allow_abbrev=False, **kwargs)

    def add_arguments(self, parser: CommandParser) -> None:
        add_flags(parser)

    def handle(self, *args: Any, **options: Any) -> None:
        if (name := unapplied(options)) is not None:
            raise CommandError(f"{name} must be in the environment: settings are read before this command begins")
        settings = get_options()
        logs.configure(settings.log_format)
        faults.arm()
        self.stdout.write("Preparing the database ...")
        try:
            declared = dialects.declared_dialects()
            setups = [dialect.set_up(settings) for dialect in declared]
            prepare_registry(settings.data_dir)
            deployment = deploy_as_configured(asked(options), settings, setups)
        except DatabaseError as error:
            raise CommandError(registry_refused(error, settings.data_dir, settings.database_url)) from error
        except (RegistryError, SetupError, ValidationError, OSError) as error:
            raise CommandError(start_refused(error)) from error
        self.stdout.write(f"Starting {deployment.name} ({deployment.version.source}) ...")
        self.stdout.flush()
        # These imports take a while, so the lines above are shown first.
        from config.control import EmbeddedControl, RegistryLed
        from config.server import Server

        try:
            status = Server(settings, declared, setups, EmbeddedControl(settings)).run()
        except (SetupError, TlsError, ValueError, RegistryLed, DatabaseError, OSError) as error:
            raise CommandError(str(error)) from error
        sys.exit(status)


@dataclass(frozen=True, slots=True)
class Asked:
    """The deployment that the command's flags ask for. Empty fields leave the choice to the settings."""

    model: str = ""
    name: str = ""
    engine_options: dict[str, Any] = field(default_factory=dict)
    adapters: list[tuple[str, str, str]] = field(default_factory=list)
    """Name, directory, and the name of the model if it was given."""


def asked(flags: Mapping[str, Any]) -> Asked:
    """The deployment of the parsed flags; raises CommandError."""
    named = flags.get("served_model_name") or []
    if len(set(named)) > 1:
        raise CommandError("--served-model-name: a deployment has one name here; deploy the model again for another")
    models = {flags[key] for key in ("model", "model_given") if flags.get(key)}
    if len(models) > 1:
        raise CommandError("--model: the model is named twice")
    adapters = flags.get("lora_modules") or []
    if len({name for name, _, _ in adapters}) < len(adapters):
        raise CommandError("--lora-modules: two adapters have one name")
    return Asked("".join(models), named[0] if named else "", engine_options(flags), adapters)


def deploy_as_configured(asked: Asked, settings: Options, setups: Iterable[Setup]) -> Deployment:
    """Deploy the model that the command names, else the first deployment that a dialect wants, else the setting's
    model.
    """
    wanted = next((setup.deployment for setup in setups if setup.deployment is not None), None)
    if asked.model or wanted is None:
        deployment = deploy(asked.model or settings.model, asked.name, asked.engine_options)
    else:
        options = {**dict(wanted.engine_options), **asked.engine_options}
        deployment = deploy(wanted.source, asked.name or wanted.name, options, find_adapters=False)
        for name, directory in wanted.adapters:
            register_adapter(name, deployment, _directory(directory), ACTOR)
    for name, directory, base in asked.adapters:
        if base not in ("", deployment.name):
            raise CommandError(f"--lora-modules: {name} is of the model {base}, which is not served")
        register_adapter(name, deployment, _directory(directory), ACTOR)
    return deployment


def _directory(path: str) -> str:
    return str(Path(path).expanduser().resolve())


def deploy(
    source: str, name: str = "", changed_options: dict[str, Any] | None = None, *, find_adapters: bool = True
) -> Deployment:
    """Register and start the deployment of this source, and make it the default; an earlier default is stopped.

    Without a `name` it is named after the source; `changed_options` override the engine options of the settings.
    With `find_adapters` those beside the model, and those of the demo model, are registered.
    """
    settings = get_options()
    path = Path(source).expanduser()
    local = path.is_dir()
    if local:
        source = str(path.resolve())
    looks_like_path = local or source.startswith((".", "/", "~"))
    name = name or (
        re.sub(r"[^A-Za-z0-9._/-]", "-", path.resolve().name if looks_like_path else source).lstrip("._/-") or "model"
    )
    version = register_model(name, source, ACTOR)
    engine_options = settings.engine_options | (changed_options or {})
    deployment = Deployment.objects.filter(name=name, deleted=False).first()
    if deployment is None:
        deployment = create_deployment(name, version, ACTOR, engine_options)
    elif deployment.version != version or deployment.engine_options != engine_options:
        if deployment.version.model != version.model:
            for adapter in deployment.adapters.all():  # of the model that it had
                remove_adapter(adapter, ACTOR)
        change_deployment(deployment, ACTOR, version=version, engine_options=engine_options)
    for other in Deployment.objects.filter(is_default=True).exclude(pk=deployment.pk):
        stop_deployment(other, ACTOR)
    make_default(deployment, ACTOR)
    start_deployment(deployment, ACTOR, max(1, deployment.min_workers))
    if find_adapters:
        if local and path.resolve() == DEMO_MODEL:
            for directory in sorted(p for p in DEMO_ADAPTERS.glob("*") if p.is_dir()):
                register_adapter(directory.name, deployment, str(directory), ACTOR)
        register_beside(deployment, ACTOR)
    deployment.refresh_from_db()
    return deployment
