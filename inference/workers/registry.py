"""The registry interface of the data plane; implemented in `config.registry`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from management.snapshot import AdapterEntry


@dataclass(frozen=True, slots=True)
class DeploymentState:
    """A deployment in the registry; `state` is stopped, starting, ready, stopping or failed."""

    name: str
    version: int
    state: str
    reason: str


class Registry(Protocol):
    """Changes are durable and in the snapshot when a call returns. `actor` is recorded in the audit log."""

    async def read_adapter(self, name: str, source: str) -> AdapterEntry:
        """Read and hash an adapter's files; registers nothing.

        Raises AdapterNotFound if there are none or access is not allowed, AdapterRefused for files that are not a
        LoRA.
        """
        ...

    async def register_adapter(self, name: str, model: str, source: str, actor: str) -> None:
        """Register the adapter; an adapter of the same name with other content is replaced. Raises AdapterRefused."""
        ...

    async def remove_adapter(self, name: str, actor: str) -> None:
        """Remove the adapter of this name, if there is one."""
        ...

    async def deployments(self) -> list[DeploymentState]:
        """All deployments, including stopped ones."""
        ...

    async def start_deployment(self, name: str, actor: str) -> bool:
        """Set the desired number of workers to at least 1; False for an unknown deployment."""
        ...

    async def stop_deployment(self, name: str, actor: str) -> bool:
        """Set the desired number of workers to 0; False for an unknown deployment."""
        ...
