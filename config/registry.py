"""Implements the data plane's registry interface with the control plane's services."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, ParamSpec, TypeVar

import structlog
from django.db import Error, close_old_connections

from engine.adapters.files import CONFIG, WEIGHTS
from inference.errors import AdapterNotFound, AdapterRefused, Unavailable
from inference.workers.registry import DeploymentState
from management.models import Adapter, Deployment, Model, Worker
from management.services import adapters, deployments
from management.services.errors import RegistryError
from management.snapshot import AdapterEntry

if TYPE_CHECKING:
    from collections.abc import Callable

    from config.control import Control
    from management.ledger import Observed

logger = structlog.get_logger(__name__)


MAX_SHOWN = 1000
"""Characters of a client's path that an error repeats."""
STATES = {
    str(Deployment.State.ACTIVE): "ready",
    str(Deployment.State.PROVISIONING): "starting",
    str(Deployment.State.FAILED): "failed",
    str(Deployment.State.DELETING): "stopping",
}
"""The data plane's words for states."""
T = TypeVar("T")
P = ParamSpec("P")


CALL_TIMEOUT_S = 8.0
"""A little more than one wait for the database may take."""

_threads = ThreadPoolExecutor(4, "registry")
"""A pool of its own, so that other work does not wait for the database."""


async def _with_database(function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Run in a thread; an unavailable database is reported as Unavailable, not as an internal error."""

    def call() -> T:
        close_old_connections()  # a connection that broke since the last call would fail forever
        try:
            return function(*args, **kwargs)
        finally:
            close_old_connections()

    try:
        async with asyncio.timeout(CALL_TIMEOUT_S):
            return await asyncio.get_running_loop().run_in_executor(_threads, call)
    except (Error, TimeoutError) as error:
        logger.warning("database not reachable", error=str(error) or "no answer in time")
        raise Unavailable("The registry is not reachable at the moment.") from error


class DjangoRegistry:
    """Implements `inference.workers.registry.Registry`.

    `control` publishes changes and knows observed state that is not in the database yet; `roots` are the folders
    that clients may load adapters from, None: any folder.
    """

    def __init__(self, control: Control, roots: list[Path] | None) -> None:
        self._control = control
        self._roots = None if roots is None else [root.resolve() for root in roots]

    async def read_adapter(self, name: str, source: str) -> AdapterEntry:
        return await asyncio.to_thread(self._read, name, source)

    async def register_adapter(self, name: str, model: str, source: str, actor: str) -> None:
        identity = await asyncio.to_thread(_identity, Path(source))
        await _with_database(self._register, name, model, source, actor, identity)

    async def remove_adapter(self, name: str, actor: str) -> None:
        await _with_database(self._remove, name, actor)

    async def deployments(self) -> list[DeploymentState]:
        return await _with_database(self._deployments)

    async def start_deployment(self, name: str, actor: str) -> bool:
        return await _with_database(self._start, name, actor)

    async def stop_deployment(self, name: str, actor: str) -> bool:
        return await _with_database(self._stop, name, actor)

    def _read(self, name: str, source: str) -> AdapterEntry:
        try:
            directory = Path(source).expanduser().resolve()
            files = [(directory / file).resolve() for file in (CONFIG, WEIGHTS)]
            # An adapter's file is never empty; files that the kernel generates on reading have size 0.
            there = all(file.is_file() and file.stat().st_size for file in files)
        except (
            OSError,
            ValueError,
            RuntimeError,
        ) as error:  # not valid text, or an unknown user's home
            raise AdapterNotFound(source[:MAX_SHOWN]) from error
        # Files are checked too: a symbolic link must not lead out of the folders.
        allowed = self._roots is None or all(
            any(path.is_relative_to(root) for root in self._roots) for path in (directory, *files)
        )
        if not allowed or not there:
            raise AdapterNotFound(source[:MAX_SHOWN])
        digest, _ = _identity(directory)
        return AdapterEntry(name=name, digest=digest, directory=str(directory), created=0)

    def _register(self, name: str, model: str, source: str, actor: str, identity: tuple[str, int]) -> None:
        try:
            adapters.register_read_adapter(name, Model.objects.get(name=model), source, actor, identity)
        except RegistryError as error:
            raise AdapterRefused(str(error), error.failure) from error
        self._control.refresh()

    def _remove(self, name: str, actor: str) -> None:
        adapter = Adapter.objects.filter(name=name).first()
        if adapter is not None:
            adapters.remove_adapter(adapter, actor)
        self._control.refresh()

    def _deployments(self) -> list[DeploymentState]:
        states = []
        for row in Deployment.objects.filter(deleted=False).select_related("version"):
            seen = self._control.observed(row)
            states.append(DeploymentState(row.name, row.version.number, _state(row, seen), seen.reason))
        return states

    def _start(self, name: str, actor: str) -> bool:
        row = Deployment.objects.filter(name=name, deleted=False).first()
        if row is None:
            return False
        resting = (str(Deployment.State.FAILED), str(Deployment.State.INACTIVE))
        if not row.replicas or self._control.observed(row).state in resting:
            deployments.start_deployment(row, actor)
        self._control.refresh()
        return True

    def _stop(self, name: str, actor: str) -> bool:
        row = Deployment.objects.filter(name=name, deleted=False).first()
        if row is None:
            return False
        deployments.stop_deployment(row, actor)
        self._control.refresh()
        return True


def _identity(directory: Path) -> tuple[str, int]:
    try:
        return adapters.read_identity(directory)
    except RegistryError as error:
        raise AdapterRefused(str(error), error.failure) from error


def _state(row: Deployment, seen: Observed) -> str:
    """The state in the data plane's words: the observed one, unless the desired state is newer. A sleeping deployment is
    ready, for a request wakes it.
    """
    state = seen.state
    if not row.replicas:
        state = str(Deployment.State.INACTIVE)
    elif seen.generation != row.generation and state != str(Deployment.State.ACTIVE):
        return "starting"
    if state == str(Deployment.State.INACTIVE):
        if row.wakeable:
            return "ready"
        return "stopping" if row.workers.filter(state__in=Worker.LIVE).exists() else "stopped"
    return STATES[state]
