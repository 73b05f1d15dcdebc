"""Implements the data plane's registry interface with the control plane's services."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, Unpack

import structlog
from django.db import Error, IntegrityError, close_old_connections
from django.db.models import Prefetch

from engine.adapters.failures import AdapterCode, AdapterFailure
from engine.adapters.files import CONFIG
from inference.errors import (
    AdapterExists,
    AdapterNotFound,
    AdapterRefused,
    AdapterUnnameable,
    InvalidRequest,
    ModelExists,
    SourceNotFound,
    Unavailable,
)
from inference.workers.registry import DeploymentState, WorkerState
from management.adapter_store import StoredAdapter
from management.database_errors import one_line
from management.models import Adapter, Deployment, Worker
from management.services import adapters, deployments, errors
from management.services.served_models import NewVersion, create_version
from management.services.sources import SourceNotAllowed
from management.snapshot import AdapterEntry

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from config.control import Control
    from inference.workers.registry import Kept, NewDeployment
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


CALL_TIMEOUT_S = 8.0
"""A little more than one wait for the database may take."""
CREATE_TIMEOUT_S = 300.0
"""A model's own adapters are copied."""

_threads = ThreadPoolExecutor(4, "registry")
"""A pool of its own, so that other work does not wait for the database."""
_creations = ThreadPoolExecutor(2, "creation")
"""Another for what may take minutes, so that the short calls do not wait for it."""


def _is_not_there(failure: AdapterFailure) -> bool:
    """Whether there is no adapter at all. A client is not told where a link leads, nor that there is one."""
    missing = failure.code is AdapterCode.MISSING and failure.facts["file"] == CONFIG
    return missing or failure.code is AdapterCode.LINK


async def _with_database(
    function: Callable[..., T],
    *args: Any,
    timeout_s: float = CALL_TIMEOUT_S,
    threads: ThreadPoolExecutor = _threads,
) -> T:
    """Run in a thread; an unavailable database is reported as Unavailable, not as an internal error."""

    def call() -> T:
        close_old_connections()  # a connection that broke since the last call would fail forever
        try:
            return function(*args)
        finally:
            close_old_connections()

    try:
        async with asyncio.timeout(timeout_s):
            return await asyncio.get_running_loop().run_in_executor(threads, call)
    except (Error, TimeoutError) as error:
        logger.warning(
            "database not reachable", error=one_line(error) if isinstance(error, Error) else "no answer in time"
        )
        raise Unavailable("The registry is not reachable at the moment.") from error


class DjangoRegistry:
    """Implements `inference.workers.registry.Registry`.

    `control` publishes changes and knows observed state that is not in the database yet; `roots` are the folders
    that clients may load adapters from, None: any folder.
    """

    def __init__(self, control: Control, roots: list[Path] | None) -> None:
        self._control, self._roots = control, roots

    async def read_adapter(self, name: str, source: str, options: Mapping[str, str] | None) -> AdapterEntry:
        return await asyncio.to_thread(self._read, name, source, options)

    async def register_adapter(
        self,
        adapter: AdapterEntry,
        deployment: str,
        actor: str,
        *,
        replace: bool,
        **kept: Unpack[Kept],
    ) -> None:
        await _with_database(self._register, adapter, deployment, actor, replace, kept)

    async def change_adapter(self, name: str, deployment: str, actor: str, **kept: Unpack[Kept]) -> None:
        await _with_database(self._change, name, deployment, actor, kept)

    async def remove_adapter(self, name: str, actor: str, deployment: str) -> None:
        await _with_database(self._remove, name, actor, deployment)

    async def deployments(self) -> list[DeploymentState]:
        return await _with_database(self._deployments)

    async def create_deployment(self, wanted: NewDeployment, actor: str) -> DeploymentState:
        return await _with_database(self._create, wanted, actor, timeout_s=CREATE_TIMEOUT_S, threads=_creations)

    async def scale_deployment(self, name: str, minimum: int, maximum: int, actor: str) -> bool:
        return await _with_database(self._act, name, deployments.set_workers, actor, minimum, maximum)

    async def remove_deployment(self, name: str, actor: str) -> bool:
        return await _with_database(self._act, name, remove, actor)

    async def leftover_workers(self, name: str) -> int:
        return await _with_database(count_leftovers, name)

    async def make_default_version(self, name: str, actor: str) -> bool:
        return await _with_database(self._act, name, deployments.make_default_version, actor)

    async def start_deployment(self, name: str, actor: str) -> bool:
        return await _with_database(self._start, name, actor)

    async def stop_deployment(self, name: str, actor: str) -> bool:
        return await _with_database(self._act, name, deployments.stop_deployment, actor)

    def _read(self, name: str, source: str, options: Mapping[str, str] | None) -> AdapterEntry:
        try:
            adapters.check_new(name, options)
        except errors.RegistryError as error:
            raise AdapterUnnameable(str(error)) from error
        try:
            stored = adapters.read_adapter(source, self._roots)
        except errors.StoreFull as error:
            raise Unavailable("There is no room on the disk for the adapter.") from error
        except errors.RegistryError as error:
            if error.failure is not None and _is_not_there(error.failure):
                raise AdapterNotFound(source[:MAX_SHOWN]) from error
            raise AdapterRefused(str(error), error.failure) from error
        return AdapterEntry(
            name=name,
            digest=stored.digest,
            directory=str(stored.directory),
            created=0,
            rank=stored.rank,
            source=source,
        )

    def _register(self, adapter: AdapterEntry, deployment: str, actor: str, replace: bool, kept: Kept) -> None:
        row = Deployment.objects.filter(name=deployment, deleted=False).first()
        if row is None:
            raise Unavailable(f"The deployment {deployment} is being removed.")
        stored = StoredAdapter(adapter.digest, adapter.rank, Path(adapter.directory))
        try:
            adapters.register_adapter(adapter.name, row, adapter.source, actor, stored, replace=replace, **kept)
        except errors.RegistryConflict as error:
            raise AdapterExists(adapter.name) from error
        except errors.RegistryError as error:
            raise AdapterRefused(str(error), error.failure) from error
        self._control.refresh()

    def _change(self, name: str, deployment: str, actor: str, kept: Kept) -> None:
        adapter = Adapter.objects.filter(deployment__name=deployment, deployment__deleted=False, name=name).first()
        if adapter is None:
            raise AdapterNotFound(name)
        try:
            adapters.change_adapter(adapter, actor, **kept)
        except errors.RegistryConflict as error:
            raise AdapterNotFound(name) from error
        except errors.RegistryError as error:
            raise AdapterRefused(str(error), error.failure) from error
        self._control.refresh()

    def _remove(self, name: str, actor: str, deployment: str) -> None:
        adapter = Adapter.objects.filter(deployment__name=deployment, deployment__deleted=False, name=name).first()
        if adapter is not None:
            adapters.remove_adapter(adapter, actor)
        self._control.refresh()

    def _deployments(self) -> list[DeploymentState]:
        rows = Deployment.objects.filter(deleted=False).select_related("version").prefetch_related(_LIVE_WORKERS)
        return [self._described(row) for row in rows.order_by("created_at", "pk")]

    def _described(self, row: Deployment) -> DeploymentState:
        seen = self._control.observed(row)
        return DeploymentState(
            name=row.name,
            version=row.version.number,
            state=_state(row, seen),
            reason=seen.reason,
            served_name=row.served_as,
            label=row.version_label,
            is_default_version=row.is_default_version,
            source=row.version.source,
            min_workers=row.min_workers,
            max_workers=row.max_workers,
            wanted_workers=row.wanted_workers,
            vendor_fields=row.vendor_fields,
            workers=tuple(map(_worker, row.workers.all())),
            public_id=row.public_id,
        )

    def _create(self, wanted: NewDeployment, actor: str) -> DeploymentState:
        asked = NewVersion(
            wanted.candidates,
            wanted.served_name,
            wanted.label,
            wanted.workers,
            wanted.max_workers,
            wanted.vendor_fields,
            wanted.folders,
            wanted.only,
        )
        try:
            row = create_version(asked, actor)
        except (errors.SourceNotFound, SourceNotAllowed) as error:
            raise SourceNotFound(str(error)) from error
        except errors.VersionExists as error:
            raise ModelExists(error.name, error.label) from error
        except errors.RegistryError as error:
            raise InvalidRequest(str(error), next(iter(error.fields), None)) from error
        except IntegrityError as error:  # another call took the name
            raise ModelExists(wanted.served_name or wanted.candidates[0], wanted.label) from error
        self._control.refresh()
        return self._described(row)

    def _act(self, name: str, act: Callable[..., object], actor: str, *args: Any) -> bool:
        """Call a service for the deployment of this name."""
        row = Deployment.objects.filter(name=name, deleted=False).first()
        if row is None:
            return False
        try:
            act(row, actor, *args)
        except errors.RegistryConflict:  # it was deleted meanwhile
            return False
        except errors.RegistryError as error:
            raise InvalidRequest(str(error), next(iter(error.fields), None)) from error
        self._control.refresh()
        return True

    def _start(self, name: str, actor: str) -> bool:
        return self._act(name, self._wake, actor)

    def _wake(self, row: Deployment, actor: str) -> None:
        resting = (str(Deployment.State.FAILED), str(Deployment.State.INACTIVE))
        if row.stopped or self._control.observed(row).state in resting:
            deployments.start_deployment(row, actor)


def remove(deployment: Deployment, actor: str) -> None:
    """Delete a deployment; raises RegistryConflict if someone else has done so since it was read."""
    if not deployments.delete_deployment(deployment, actor):
        raise errors.RegistryConflict(f"{deployment.name} has been deleted")


def count_leftovers(name: str) -> int:
    """How many workers of removed deployments of this name have not ended."""
    return Worker.objects.filter(deployment__name=name, deployment__deleted=True, state__in=Worker.LIVE).count()


def _state(row: Deployment, seen: Observed) -> str:
    """The state in the data plane's words: the observed one, unless the desired state is newer. A sleeping deployment is
    ready, for a request wakes it.
    """
    state = seen.state
    if row.stopped:
        state = str(Deployment.State.INACTIVE)
    elif seen.generation != row.generation and state != str(Deployment.State.ACTIVE):
        return "starting"
    if state == str(Deployment.State.INACTIVE):
        if row.wakeable:
            return "ready"
        return "stopping" if row.workers.filter(state__in=Worker.LIVE).exists() else "stopped"
    return STATES[state]


_LIVE_WORKERS = Prefetch("workers", Worker.objects.filter(state__in=Worker.LIVE).order_by("index", "epoch"))
WORKER_STATES = {str(Worker.State.READY): "ready", str(Worker.State.DRAINING): "draining"}


def _worker(row: Worker) -> WorkerState:
    state = WORKER_STATES.get(row.state, "starting")
    return WorkerState(row.index, state, row.started_at.timestamp(), row.process_id)
