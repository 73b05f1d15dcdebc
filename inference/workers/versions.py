"""Versions of a served name, and waiting for their workers; for the dialects that manage models."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import TYPE_CHECKING

from inference.errors import DeadlineExceeded, ModelNotFound, ServingError, StartFailed, VersionNotFound

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


async def until_scaled(
    services: Services, wanted: DeploymentState, timeout_s: float, minimum: int, maximum: int
) -> None:
    """Wait until the deployment has `minimum` to `maximum` ready workers and no others, as many as it should have, and this
    process is connected to them. Raises StartFailed with the reason if that cannot be, DeadlineExceeded after `timeout_s`.
    """
    name = wanted.name
    try:
        async with asyncio.timeout(timeout_s):
            while True:
                state = await _now(services, wanted)
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
                    return
                await asyncio.sleep(POLL_S)
    except TimeoutError as error:
        raise DeadlineExceeded(f"{name} has not reached the desired number of workers in {timeout_s:g} s.") from error


async def until_started(
    services: Services, made: DeploymentState, timeout_s: float, minimum: int, maximum: int, actor: str
) -> None:
    """Wait as `until_scaled` for a deployment that was just created; one that does not start is removed again. Raises
    StartFailed or DeadlineExceeded.
    """
    try:
        await until_scaled(services, made, timeout_s, minimum, maximum)
    except (StartFailed, DeadlineExceeded):
        with suppress(ServingError):  # the reason of the failure is more useful
            if await _now(services, made) is not None:
                await services.registry.remove_deployment(made.name, actor)
        raise


async def _now(services: Services, known: DeploymentState) -> DeploymentState | None:
    """The same deployment as it is now; None once it is removed, also if another one has its name."""
    states = await services.registry.deployments()
    return next((each for each in states if (each.name, each.public_id) == (known.name, known.public_id)), None)
