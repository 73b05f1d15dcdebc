"""The registries for the data plane: its protocol over the control plane's services."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING, ParamSpec, TypeVar

import structlog
from asgiref.sync import sync_to_async
from django.db import DatabaseError

from inference.errors import AdapterNotFound, AdapterRefused, Unavailable
from inference.registry import DeploymentState
from management.models import Adapter, Deployment, Model
from management.services import adapters, deployments
from management.services.errors import RegistryError
from management.services.snapshots import build_snapshot
from management.snapshot import AdapterEntry

if TYPE_CHECKING:
    from collections.abc import Callable

    from management.snapshot import SnapshotHolder

logger = structlog.get_logger(__name__)


T = TypeVar("T")
P = ParamSpec("P")


async def _with_database(function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Run where Django's connections live; a database that is away is a refusal, and no failure of ours."""
    try:
        return await sync_to_async(function)(*args, **kwargs)
    except DatabaseError as error:
        logger.warning("registry not reachable", error=str(error))
        raise Unavailable("The registry is not reachable at the moment.") from error


class DjangoRegistry:
    """`inference.registry.Registry`. `roots` are the folders that clients may name adapters in; None: any folder."""

    def __init__(self, holder: SnapshotHolder, roots: list[Path] | None) -> None:
        self._holder = holder
        self._roots = None if roots is None else [root.resolve() for root in roots]

    async def read_adapter(self, name: str, source: str) -> AdapterEntry:
        """The identity of an adapter's files, for workers to read them."""
        return await asyncio.to_thread(self._read, name, source)

    async def register_adapter(self, name: str, model: str, source: str, actor: str) -> None:
        """Register for the model of this name."""
        await _with_database(self._register, name, model, source, actor)

    async def remove_adapter(self, name: str, actor: str) -> None:
        """Remove the row."""
        await _with_database(self._remove, name, actor)

    async def deployments(self) -> list[DeploymentState]:
        """The rows, by name."""
        return await _with_database(self._deployments)

    async def start_deployment(self, name: str, actor: str) -> bool:
        """Ask for at least one worker, and give a failed one a fresh chance."""
        return await _with_database(self._start, name, actor)

    async def stop_deployment(self, name: str, actor: str) -> bool:
        """Ask for no workers."""
        return await _with_database(self._stop, name, actor)

    def _read(self, name: str, source: str) -> AdapterEntry:
        try:
            directory = Path(source).expanduser().resolve()
        except (OSError, ValueError, RuntimeError) as error:  # no text of a path, or nobody's home
            raise AdapterNotFound(source) from error
        allowed = self._roots is None or any(directory.is_relative_to(root) for root in self._roots)
        if not allowed or not all((directory / file).is_file() for file in adapters.FILES):
            raise AdapterNotFound(source)
        try:
            digest, _ = adapters.read_identity(directory)
        except RegistryError as error:
            raise AdapterRefused(str(error)) from error
        return AdapterEntry(name=name, digest=digest, directory=str(directory), created=0)

    def _register(self, name: str, model: str, source: str, actor: str) -> None:
        try:
            adapters.register_adapter(name, Model.objects.get(name=model), source, actor)
        except RegistryError as error:
            raise AdapterRefused(str(error)) from error
        self._holder.refresh(build_snapshot)

    def _remove(self, name: str, actor: str) -> None:
        adapter = Adapter.objects.filter(name=name).first()
        if adapter is not None:
            adapters.remove_adapter(adapter, actor)
        self._holder.refresh(build_snapshot)

    def _deployments(self) -> list[DeploymentState]:
        rows = Deployment.objects.select_related("version")
        return [DeploymentState(row.name, row.version.number, _state(row), row.reason) for row in rows]

    def _start(self, name: str, actor: str) -> bool:
        row = Deployment.objects.filter(name=name).first()
        if row is None:
            return False
        if not row.replicas or row.state == Deployment.State.FAILED:
            deployments.start_deployment(row, actor, max(1, row.replicas))
        self._holder.refresh(build_snapshot)
        return True

    def _stop(self, name: str, actor: str) -> bool:
        row = Deployment.objects.filter(name=name).first()
        if row is None:
            return False
        deployments.stop_deployment(row, actor)
        self._holder.refresh(build_snapshot)
        return True


def _state(row: Deployment) -> str:
    """What was observed, unless the wish is newer than that."""
    if not row.replicas and row.state in (Deployment.State.READY, Deployment.State.STARTING):
        return str(Deployment.State.STOPPING)
    if row.replicas and row.observed_generation != row.generation:
        return str(Deployment.State.STARTING)
    return str(row.state)
