"""Versions of a served name, and waiting for their workers; for the dialects that manage models."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from inference.errors import DeadlineExceeded, ModelNotFound, StartFailed, VersionNotFound

if TYPE_CHECKING:
    from collections.abc import Iterable

    from inference.services import Services
    from inference.workers.registry import DeploymentState

POLL_S = 0.1


def find_version(states: Iterable[DeploymentState], served_name: str, label: str = "") -> DeploymentState:
    """The deployment that is this version of the served name; an empty label means the default version. Raises ModelNotFound
    or VersionNotFound.
    """
    versions = [state for state in states if state.served_name == served_name]
    if not versions:
        raise ModelNotFound(served_name)
    found = [state for state in versions if (state.label == label if label else state.is_default_version)]
    if not found:
        raise VersionNotFound(served_name, label)
    return found[0]


async def until_scaled(services: Services, name: str, timeout_s: float, minimum: int, maximum: int) -> DeploymentState:
    """Wait until the deployment has `minimum` to `maximum` ready workers and no others, as many as it should have, and this
    process is connected to them. Raises StartFailed with the reason if that cannot be, DeadlineExceeded after `timeout_s`.
    """
    try:
        async with asyncio.timeout(timeout_s):
            while True:
                state = next((each for each in await services.registry.deployments() if each.name == name), None)
                if state is None:
                    raise StartFailed(f"{name} was removed")
                if state.state == "failed":
                    raise StartFailed(state.reason)
                ready = sum(worker.state == "ready" for worker in state.workers)
                connected = sum(
                    len(target.responsive) for target in services.router.targets if target.entry.name == name
                )
                settled = ready == len(state.workers) == state.wanted_workers
                if settled and minimum <= ready <= maximum and connected >= ready:
                    return state
                await asyncio.sleep(POLL_S)
    except TimeoutError as error:
        raise DeadlineExceeded(f"{name} has not reached the desired number of workers in {timeout_s:g} s.") from error
