"""Registers, scales and unregisters models, by the registry of deployments: a version of a model is a deployment, a
worker of TorchServe's is one of the deployment's.
"""

from __future__ import annotations

import asyncio
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from inference.dialects.torchserve.errors import (
    ARCHIVE,
    HTTP,
    TorchServeError,
    bad_request,
    internal,
    not_found,
)
from inference.dialects.torchserve.sources import check_url, find_source, without_user
from inference.errors import (
    DeadlineExceeded,
    ModelExists,
    ModelNotFound,
    SourceNotFound,
    StartFailed,
    VersionNotFound,
)
from inference.workers.registry import NewDeployment
from inference.workers.versions import POLL_S, find_version, until_scaled, until_started

if TYPE_CHECKING:
    from collections.abc import Coroutine

    from inference.dialects.torchserve.sources import Source
    from inference.dialects.torchserve.state import State
    from inference.workers.registry import DeploymentState

NAME = "torchserve"
RUNTIMES = ("python", "python3", "LSP")
DEFAULT_TIMEOUT_S = 120
DEFAULT_DELAY_MS = 100
MAX_PAGE = 100
PROGRESS = "Processing worker updates..."
OK, ACCEPTED = 200, 202
_PRINTABLE = re.compile(r"[\x20-\x7e]{0,512}")


class Outcome(NamedTuple):
    """What a call did: REST's status, and a sentence."""

    status: int
    message: str


@dataclass(frozen=True, slots=True)
class Registration:
    """A request to register a model. Numbers that are not positive, and empty texts, are not given."""

    url: str
    model_name: str = ""
    handler: str = ""
    runtime: str = ""
    batch_size: int = 0
    max_batch_delay: int = 0
    initial_workers: int = 0
    response_timeout: int = 0
    startup_timeout: int = 0
    synchronous: bool = False

    @property
    def workers(self) -> int:
        """How many workers to start."""
        return max(0, self.initial_workers)

    def vendor_fields(self, source: Source) -> dict[str, Any]:
        """What DescribeModel returns to the client."""
        archive = source.archive
        return {
            "modelUrl": without_user(self.url),
            "handler": self.handler or (archive.handler if archive else ""),
            "runtime": self.runtime or (archive.runtime if archive else "") or "python",
            "batchSize": positive(self.batch_size, 1),
            "maxBatchDelay": positive(self.max_batch_delay, DEFAULT_DELAY_MS),
            "responseTimeout": positive(self.response_timeout, DEFAULT_TIMEOUT_S),
            "startupTimeout": positive(self.startup_timeout, DEFAULT_TIMEOUT_S),
        }


def positive(value: int, default: int) -> int:
    """The value if it is positive, else the default."""
    return value if value > 0 else default


def check_model_api(state: State, status: int = 405) -> None:
    """Raise TorchServeError if clients may not change models."""
    if not state.settings.torchserve_model_api:
        raise TorchServeError("Model API disabled", "PERMISSION_DENIED", f"{ARCHIVE}ModelException", status,
                              "MethodNotAllowedException")  # fmt: skip


async def register(state: State, asked: Registration, actor: str) -> Outcome:
    """Register a model, and start its workers; waits for them if the request is synchronous. Raises ServingErrors."""
    check_model_api(state)
    if not asked.url:
        raise bad_request("Parameter url is required.")
    if asked.runtime and asked.runtime not in RUNTIMES:
        raise bad_request(f"Invalid RuntimeType value: {asked.runtime[:100]}")
    if not _PRINTABLE.fullmatch(asked.handler):
        raise bad_request("handler must have at most 512 printable ASCII characters.")
    check_url(asked.url, state.settings.torchserve_allowed_urls)
    store = state.settings.torchserve_model_store
    source = await asyncio.to_thread(find_source, asked.url, asked.model_name, store)
    creating = _create(state, asked, source, actor)
    if asked.synchronous and asked.workers:  # what does not start is not kept, whether or not the client still waits
        made = await state.services.lasting.run(_start(state, creating, asked, actor))
    else:
        made = await creating
    name, label = made.served_name, made.label
    if not asked.workers:
        text = f'Model "{name}" Version: {label} registered with 0 initial workers. Use scale workers API to add workers for the model.'
        return Outcome(OK, text)
    if not asked.synchronous:
        return Outcome(ACCEPTED, PROGRESS)
    return Outcome(OK, f'Model "{name}" Version: {label} registered with {asked.workers} initial workers')


async def _create(state: State, asked: Registration, source: Source, actor: str) -> DeploymentState:
    store = state.settings.torchserve_model_store
    wanted = NewDeployment(
        candidates=source.candidates,
        served_name=source.name,
        label=source.label,
        workers=asked.workers,
        vendor_fields={NAME: asked.vendor_fields(source)},
        folders=() if store is None else (store,),
    )
    try:
        return await state.services.registry.create_deployment(wanted, actor or NAME)
    except SourceNotFound as error:
        raise source.missing() from error
    except ModelExists as error:
        if source.remote:
            raise internal(f"Model file already exists {source.file}") from error
        text = f"Model version {error.version} is already registered for model {error.name}"
        raise TorchServeError(text, "ALREADY_EXISTS", f"{HTTP}ConflictStatusException", 409) from error


async def _start(
    state: State, creating: Coroutine[Any, Any, DeploymentState], asked: Registration, actor: str
) -> DeploymentState:
    """Create the deployment and wait for its workers; if they do not come, it is removed again."""
    made, workers = await creating, asked.workers
    timeout_s = positive(asked.startup_timeout, DEFAULT_TIMEOUT_S)
    try:
        await until_started(state.services, made, timeout_s, workers, workers, actor or NAME)
    except (StartFailed, DeadlineExceeded) as error:
        raise _not_started(made) from error
    return made


def _not_started(wanted: DeploymentState) -> TorchServeError:
    return internal(f"Failed to start workers for model {wanted.served_name} version: {wanted.label}")


async def scale(
    state: State, model: str, version: str, minimum: int, maximum: int, synchronous: bool, actor: str
) -> Outcome:
    """Set the limits of a version's workers. Raises ServingErrors."""
    if maximum < minimum:
        raise bad_request("max_worker cannot be less than min_worker.")
    found = find_version(await state.services.registry.deployments(), model, version)
    if not await state.services.registry.scale_deployment(found.name, minimum, maximum, actor or NAME):
        raise ModelNotFound(model)
    if not synchronous:
        return Outcome(ACCEPTED, PROGRESS)
    startup = found.vendor_fields.get(NAME, {}).get("startupTimeout", DEFAULT_TIMEOUT_S)
    try:
        await until_scaled(state.services, found, startup, minimum, maximum)
    except (StartFailed, DeadlineExceeded) as error:
        raise _not_started(found) from error
    suffix = f", version: {version}" if version else ""
    return Outcome(OK, f"Workers scaled to {minimum} for model: {model}{suffix}")


async def unregister(state: State, model: str, version: str, actor: str) -> Outcome:
    """Remove a version of a model, by default the default one, and wait for the end of its workers. Raises ServingErrors."""
    check_model_api(state)
    if not model:
        raise bad_request("Parameter url is required.")  # TorchServe's own words
    registry = state.services.registry
    states = await registry.deployments()
    found = find_version(states, model, version)
    if found.is_default_version and sum(each.served_name == model for each in states) > 1:
        label = f"{ARCHIVE}InvalidModelVersionException"
        raise TorchServeError(f"Cannot remove default version for model {model}", "FAILED_PRECONDITION", label, 403)
    if not await registry.remove_deployment(found.name, actor or NAME):
        raise ModelNotFound(model)
    try:
        async with asyncio.timeout(DEFAULT_TIMEOUT_S):
            while True:
                if not await registry.leftover_workers(found.name):
                    break
                await asyncio.sleep(POLL_S)
    except TimeoutError as error:
        text = f"Timed out while cleaning resources: {model}"
        raise TorchServeError(text, "DEADLINE_EXCEEDED", f"{HTTP}RequestTimeoutException", 408) from error
    return Outcome(OK, f'Model "{model}" unregistered')


async def set_default(state: State, model: str, version: str, actor: str) -> Outcome:
    """Let a version answer requests that name none. Raises ServingErrors."""
    try:
        found = find_version(await state.services.registry.deployments(), model, version)
        if not version:  # which is not the default version here
            raise VersionNotFound(model, version)
    except VersionNotFound as error:
        text = f"Model version {version[:200]} does not exist for model {model[:200]}"
        raise not_found(text, "ModelVersionNotFoundException") from error
    if not await state.services.registry.make_default_version(found.name, actor or NAME):
        raise ModelNotFound(model)
    return Outcome(OK, f'Default version successfully updated for model "{model}" to "{found.label}"')


async def list_models(state: State, limit: int, token: int) -> dict[str, Any]:
    """One page of the models, by name."""
    limit = limit if 0 < limit <= MAX_PAGE else MAX_PAGE
    token = max(0, token)
    defaults = [each for each in await state.services.registry.deployments() if each.is_default_version]
    models = sorted(defaults, key=lambda each: each.served_name)
    page = models[token : token + limit]
    listed = [{"modelName": each.served_name, "modelUrl": model_url(each)} for each in page]
    after = {"nextPageToken": str(token + limit)} if token + limit < len(models) else {}
    return {**after, "models": listed}


def model_url(state: DeploymentState) -> str:
    """The URL with which the client registered a version; of others the model's name, never a path of this machine."""
    given = state.vendor_fields.get(NAME, {}).get("modelUrl")
    if given:
        return str(given)
    return state.source.rstrip("/").rpartition("/")[2] if state.source.startswith(("/", ".")) else state.source
