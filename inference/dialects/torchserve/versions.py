"""Finds the deployment that a model's name and version mean, without the database where the snapshot knows it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from inference.dialects.torchserve.errors import NoWorker, PredictionRefused, missing_name
from inference.errors import ModelNotFound
from inference.workers.scope import scope_id, scoped
from inference.workers.versions import find_version

if TYPE_CHECKING:
    from inference.services import Services
    from management.snapshot import DeploymentEntry


@dataclass(frozen=True, slots=True)
class Served:
    """A deployment that should serve, and the adapter that the client's model name meant, if any."""

    entry: DeploymentEntry
    adapter: str = ""

    @property
    def name(self) -> str:
        """The model's name."""
        return self.entry.served_name or self.entry.name

    @property
    def model(self) -> str:
        """The name for the router."""
        return f"{self.entry.name}:{self.adapter}" if self.adapter else self.entry.name


async def find_served(services: Services, model: str, version: str) -> Served:
    """The deployment of a version of a model; an empty version means the default.

    A name that is no served model may be any that the front plane knows, such as an adapter's. Raises TorchServeError
    without a name, ModelNotFound, VersionNotFound, NoWorker.
    """
    if not model:
        raise missing_name()
    snapshot = scoped(services.holder.current)
    for entry in snapshot.deployments:
        if (entry.served_name or entry.name) == model and (
            entry.label == version if version else entry.is_default_version
        ):
            return Served(entry)
    resolved = snapshot.resolve(model)
    if resolved is not None and version in ("", resolved.deployment.label):
        return Served(resolved.deployment, "" if resolved.adapter is None else resolved.adapter.name)
    if scope_id():  # others than the one that the request is limited to do not exist for it
        raise ModelNotFound(model)
    find_version(await services.registry.deployments(), model, version)  # says which of the two is unknown
    raise NoWorker(model, version)


def with_adapter(served: Served, adapter: str) -> Served:
    """The same deployment with this adapter; raises PredictionRefused for an unknown one."""
    if served.entry.adapter(adapter) is None:
        raise PredictionRefused(f"The adapter `{adapter[:200]}` does not exist.")
    return Served(served.entry, adapter)


def named(services: Services, served: Served, name: str) -> Served:
    """What the `model` of a body means below a deployment: itself, or one of its adapters. Raises PredictionRefused."""
    entry = served.entry
    if name in ("", entry.name, served.name, entry.model):
        return served
    resolved = services.holder.current.only(entry.public_id).resolve(name)
    if resolved is None:
        raise PredictionRefused(ModelNotFound(name).message)
    return served if resolved.adapter is None else Served(entry, resolved.adapter.name)
