"""What the data plane may ask of the registries. The control plane implements it; nothing here knows how."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from management.snapshot import AdapterEntry


@dataclass(frozen=True, slots=True)
class DeploymentState:
    """One deployment as the registry has it: `state` is stopped, starting, ready, stopping or failed."""

    name: str
    version: int
    state: str
    reason: str


class Registry(Protocol):
    """Changes are durable and in the snapshot when a call returns. `actor` is who asked, for the audit."""

    async def read_adapter(self, name: str, source: str) -> AdapterEntry:
        """The identity of an adapter's files, which nothing was done with yet; raises AdapterNotFound where there is no
        adapter or where nobody may read, AdapterRefused for files that are no LoRA.
        """
        ...

    async def register_adapter(self, name: str, model: str, source: str, actor: str) -> None:
        """Give the adapter a name; the same name with other content replaces it. Raises AdapterRefused."""
        ...

    async def remove_adapter(self, name: str, actor: str) -> None:
        """Forget the adapter of this name, if there is one."""
        ...

    async def deployments(self) -> list[DeploymentState]:
        """All of them, stopped ones too."""
        ...

    async def start_deployment(self, name: str, actor: str) -> bool:
        """Ask for a worker; False where no deployment has this name."""
        ...

    async def stop_deployment(self, name: str, actor: str) -> bool:
        """Ask for none; False where no deployment has this name."""
        ...
