"""The models of this plane: deployments by their served names and versions, or by their own names."""

from __future__ import annotations

from typing import TYPE_CHECKING

from inference.errors import ModelNotFound
from inference.workers.scope import scope_id, scoped

if TYPE_CHECKING:
    from inference.http.exchange import Exchange
    from inference.services import Services
    from inference.workers.registry import DeploymentState
    from inference.workers.target import Target
    from management.snapshot import DeploymentEntry

NAME = "djl"
"""Of this dialect: in the audit log, and the key in a deployment's `vendor_fields`."""


def startup_model(services: Services) -> str | None:
    """The served name of the model of requests that name none: the default deployment's, else that of the only one."""
    entries = scoped(services.holder.current).deployments
    served = {served_name(entry) for entry in entries if entry.is_default} or {served_name(entry) for entry in entries}
    return served.pop() if len(served) == 1 else None


def actor_of(exchange: Exchange) -> str:
    """Who changes something, for the audit log."""
    return exchange.tenant or NAME


def served_name(entry: DeploymentEntry) -> str:
    """The name under which clients know it."""
    return entry.served_name or entry.name


def find_entry(services: Services, name: str, version: str = "") -> DeploymentEntry | None:
    """The running deployment of this served name and version ("": the default version), or of this name of its own."""
    entries = scoped(services.holder.current).deployments
    versions = [entry for entry in entries if served_name(entry) == name]
    if version:
        return next((entry for entry in versions if entry.label == version), None)
    found = next((entry for entry in versions if entry.is_default_version), None)
    return found or next((entry for entry in entries if entry.name == name), None)


def states_of(states: list[DeploymentState], name: str, version: str = "") -> list[DeploymentState]:
    """The versions of a served name, or the deployment of this name; those of `version` if one is given."""
    found = [state for state in states if state.served_name == name] or [s for s in states if s.name == name]
    return [state for state in found if not version or state.label == version]


async def running(services: Services, name: str, version: str = "") -> DeploymentEntry | None:
    """`find_entry`; raises ModelNotFound if the registry does not know it either, else None: it is stopped. Others than the
    one that a request is limited to do not exist for it.
    """
    entry = find_entry(services, name, version)
    if entry is None and scope_id():
        raise ModelNotFound(name)
    if entry is None and not states_of(await services.registry.deployments(), name, version):
        raise ModelNotFound(name)
    return entry


def target_of(services: Services, entry: DeploymentEntry) -> Target | None:
    """What this process knows of a deployment's model; None before its first worker was ready."""
    return next((target for target in services.router.targets if target.entry.name == entry.name), None)
