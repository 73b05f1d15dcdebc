"""The registry interface of the data plane; implemented in `config.registry`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, TypedDict, Unpack

if TYPE_CHECKING:
    from pathlib import Path

    from management.snapshot import AdapterEntry


@dataclass(frozen=True, slots=True)
class WorkerState:
    """A worker of a deployment as last observed. `state` is starting, ready or draining; `index` tells it from the
    deployment's other workers; `started` is in Unix seconds; `process_id` is None on other machines.
    """

    index: int
    state: str
    started: float
    process_id: int | None


@dataclass(frozen=True, slots=True)
class DeploymentState:
    """A deployment in the registry. `state` is stopped, starting, ready, stopping or failed; a sleeping one is ready."""

    name: str
    version: int
    """The number of its model's version."""
    state: str
    reason: str
    """Why it failed, or is not ready."""
    served_name: str = ""
    """The name under which clients find it. Several deployments may share one, as its versions; one is the default."""
    label: str = ""
    """Which version of the served name it is, such as "1.0"."""
    is_default_version: bool = True
    source: str = ""
    """Its model's directory or hub id."""
    min_workers: int = 1
    max_workers: int = 1
    wanted_workers: int = 0
    """How many workers should run now."""
    vendor_fields: Mapping[str, Any] = field(default_factory=dict)
    """What a dialect's client gave when it registered the deployment, to be returned to it."""
    workers: Sequence[WorkerState] = ()
    public_id: str = ""
    """Tells it from an earlier deployment of the same name."""


@dataclass(frozen=True, slots=True)
class NewDeployment:
    """A deployment to create.

    `candidates` name its model: registered models (`NAME`, or `NAME:NUMBER` for one version), their sources, directories,
    or hub ids in the local cache; the first one that exists is used, and nothing is downloaded. A relative directory is
    looked up below `folders`; directories must lie below them or below the operator's model folders.
    """

    candidates: Sequence[str]
    served_name: str
    """Empty: the name of the candidate that was found, without an owner's name before a slash."""
    label: str = ""
    """Empty: what the directory's own MAR-INF/MANIFEST.json says; the model version's number for a registered model; else
    the next free one, first "1.0"."""
    workers: int = 0
    """Desired number of workers at first; 0 leaves the deployment stopped."""
    max_workers: int | None = None
    """None: as many as `workers`."""
    vendor_fields: Mapping[str, Any] = field(default_factory=dict)
    folders: Sequence[Path] = ()
    only: bool = False
    """Whether it is refused where another version is served under the name."""


class Kept(TypedDict, total=False):
    """How an adapter is kept; None or absent keeps the present value. `options` are what the client gave besides."""

    preload: bool | None
    pinned: bool | None
    options: Mapping[str, str] | None


class Registry(Protocol):
    """Changes are durable and in the snapshot when a call returns. `actor` is recorded in the audit log. Every call may raise
    Unavailable if the registry cannot be reached.
    """

    async def read_adapter(self, name: str, source: str, options: Mapping[str, str] | None) -> AdapterEntry:
        """Check an adapter's name and options, then its files, and copy these into the adapter store; registers nothing.

        Raises AdapterUnnameable for the name and the options, AdapterNotFound if there are no files or access is not allowed,
        AdapterRefused for files that are not a LoRA.
        """
        ...

    async def register_adapter(
        self,
        adapter: AdapterEntry,
        deployment: str,
        actor: str,
        *,
        replace: bool,
        **kept: Unpack[Kept],
    ) -> None:
        """Register what `read_adapter` returned for a deployment. Raises AdapterExists unless `replace`,
        AdapterRefused.
        """
        ...

    async def change_adapter(self, name: str, deployment: str, actor: str, **kept: Unpack[Kept]) -> None:
        """Change how an adapter is kept, and merge `options` over its own. Raises AdapterNotFound."""
        ...

    async def remove_adapter(self, name: str, actor: str, deployment: str) -> None:
        """Remove the adapter of this name, if there is one, from this deployment."""
        ...

    async def deployments(self) -> list[DeploymentState]:
        """All deployments, including stopped ones, oldest first."""
        ...

    async def create_deployment(self, wanted: NewDeployment, actor: str) -> DeploymentState:
        """Register the model if it is not, and create the deployment. The first version of a served name is its default.

        Raises SourceNotFound if no candidate exists, or only in a folder that is not allowed; ModelExists if the served name has
        this version; InvalidRequest with the field for what cannot be served.
        """
        ...

    async def scale_deployment(self, name: str, minimum: int, maximum: int, actor: str) -> bool:
        """Set the limits of the number of workers, and ask for a number within them: 0 to 0 stops the deployment. False for
        an unknown deployment; raises InvalidRequest.
        """
        ...

    async def remove_deployment(self, name: str, actor: str) -> bool:
        """Delete a deployment; its workers finish their requests first. False for an unknown deployment."""
        ...

    async def leftover_workers(self, name: str) -> int:
        """How many workers of removed deployments of this name have not ended yet."""
        ...

    async def make_default_version(self, name: str, actor: str) -> bool:
        """Let this deployment answer requests for its served name. False for an unknown deployment."""
        ...

    async def start_deployment(self, name: str, actor: str) -> bool:
        """Set the desired number of workers to at least 1; False for an unknown deployment."""
        ...

    async def stop_deployment(self, name: str, actor: str) -> bool:
        """Set the desired number of workers to 0; False for an unknown deployment."""
        ...
