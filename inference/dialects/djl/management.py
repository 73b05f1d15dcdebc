"""Changes of models: register, scale, unregister."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from inference.dialects.djl.errors import DjlError, bad_request, not_found, not_ready
from inference.dialects.djl.listing import DEFAULTS, status_of
from inference.dialects.djl.models import NAME, actor_of, states_of
from inference.dialects.djl.parameters import as_integer, query_of, read_parameters
from inference.dialects.djl.sources import path_of
from inference.errors import DeadlineExceeded, ModelExists, NotServed, SourceNotFound, StartFailed
from inference.vendors.model_server import pretty
from inference.workers.registry import NewDeployment
from inference.workers.versions import until_started

if TYPE_CHECKING:
    from collections.abc import Coroutine

    from inference.dialects.djl.parameters import Parameters
    from inference.http.exchange import Exchange
    from inference.services import Services
    from inference.workers.registry import DeploymentState

START_TIMEOUT_S = 600.0
MAX_WORKERS = 1 << 16
"""More than any deployment has."""
NO_WORKFLOWS = "Workflows cannot be registered on this server. Register a model with POST /models."


async def register(exchange: Exchange, services: Services) -> None:
    """POST /models: create a deployment; `synchronous` (true) answers when its workers are ready, and what does not start is
    not kept, whether or not the client still waits.
    """
    parameters = await read_parameters(exchange)
    url = parameters.text("url")
    if url is None:
        raise bad_request("Parameter url is required.")
    wanted = _wanted(parameters, url)
    synchronous = parameters.flag("synchronous")
    creating = _create(services, wanted, url, actor_of(exchange))
    if synchronous is False:
        state = await creating
        await exchange.respond(pretty({"status": f'Model "{_name(state)}" registration scheduled.'}, 202))
        return
    state = await exchange.unless_gone(
        services.lasting.run(_start(services, creating, wanted.workers, actor_of(exchange)))
    )
    await exchange.respond(pretty({"status": f'Model "{_name(state)}" registered.'}))


async def scale(exchange: Exchange, services: Services) -> None:
    """PUT /models/{model} and /models/{model}/{version}: the limits of the number of workers. Without a version, of all."""
    parameters = await read_parameters(exchange)
    least, most = _workers(parameters, "min_worker"), _workers(parameters, "max_worker")
    found = await _found(exchange, services)
    for state in found:
        if status_of(state) != "READY" and state.state != "stopped":
            raise not_ready(f"Model or workflow is not ready: {state.served_name}")
    limits = [_limits(state, least, most) for state in found]
    lines = []
    for state, (minimum, maximum) in zip(found, limits, strict=True):
        if not await services.registry.scale_deployment(state.name, minimum, maximum, actor_of(exchange)):
            raise _not_found(exchange)
        lines.append(
            f'Workflow "{state.served_name}" worker scaled. New Worker configuration min workers:{minimum} '
            f"max workers:{maximum}"
        )
    await exchange.respond(pretty({"status": "\n".join(lines)}))


async def unregister(exchange: Exchange, services: Services) -> None:
    """DELETE /models/{model} and /models/{model}/{version}: running requests finish first. Without a version, all."""
    for state in await _found(exchange, services):
        await services.registry.remove_deployment(state.name, actor_of(exchange))
    text = f'Model or workflow "{exchange.parameters["model"]}" unregistered'
    await exchange.respond(pretty({"status": text}))


async def refuse_workflow(exchange: Exchange, services: Services) -> None:
    """POST /workflows: its parameters are checked as DJL Serving does."""
    query = query_of(exchange)
    if "url" not in query and "template" not in query:
        raise bad_request("Either parameter url or template is required.")
    raise NotServed(NO_WORKFLOWS)


async def _create(services: Services, wanted: NewDeployment, url: str, actor: str) -> DeploymentState:
    try:
        return await services.registry.create_deployment(wanted, actor)
    except ModelExists as error:
        raise DjlError(409, "BadRequestException", f"Workflow {error.name[:200]} is already registered.") from error
    except SourceNotFound as error:
        raise not_found(f"The model was not found at {url[:500]}, or this server may not serve it.") from error


async def _start(
    services: Services, creating: Coroutine[Any, Any, DeploymentState], workers: int, actor: str
) -> DeploymentState:
    """Create the deployment and wait for so many workers; if they do not come, it is removed again."""
    state = await creating
    if not workers:
        return state
    try:
        await until_started(services, state, START_TIMEOUT_S, workers, MAX_WORKERS, actor)
    except StartFailed as error:
        raise DjlError(400, "ModelException", f"The model could not be started: {error.message}") from error
    except DeadlineExceeded as error:
        raise DjlError(503, "WlmException", f"The model has not started in {START_TIMEOUT_S:g} s.") from error
    return state


def _name(state: DeploymentState) -> str:
    return state.served_name or state.name


async def _found(exchange: Exchange, services: Services) -> list[DeploymentState]:
    name, version = exchange.parameters["model"], exchange.parameters.get("version", "")
    found = states_of(await services.registry.deployments(), name, version)
    if not found:
        raise _not_found(exchange)
    return found


def _not_found(exchange: Exchange) -> DjlError:
    return not_found(f"Model or workflow not found: {exchange.parameters['model']}")


def _wanted(parameters: Parameters, url: str) -> NewDeployment:
    path = path_of(url)
    if path is None:
        raise bad_request(
            f"This server downloads nothing: {url.partition(':')[0][:100]} URLs are not supported. Name a directory, or a model that is "
            "registered or in the local cache."
        )
    least, most = _workers(parameters, "min_worker"), _workers(parameters, "max_worker")
    workers = (1 if most is None else min(1, most)) if least is None else least
    if most is not None and most < workers:
        raise bad_request("max_worker cannot be less than min_worker.")
    vendor_fields: dict[str, Any] = {
        name: value for name in DEFAULTS if (value := _number(parameters, name)) is not None
    }
    for name in ("engine", "device"):
        if (text := parameters.text(name)) is not None:
            vendor_fields[name] = text
    return NewDeployment(
        candidates=[path],
        served_name=parameters.text("model_name") or "",
        label=parameters.text("model_version") or "",
        workers=workers,
        max_workers=most,
        vendor_fields={NAME: vendor_fields},
        only=parameters.text("model_version") is None,
    )


def _limits(state: DeploymentState, least: int | None, most: int | None) -> tuple[int, int]:
    """The new limits; the one that is not given moves only as far as the other needs it."""
    if least is not None and most is not None and most < least:
        raise bad_request("max_worker cannot be less than min_worker.")
    minimum = min(state.min_workers, state.max_workers if most is None else most) if least is None else least
    maximum = max(state.max_workers, minimum) if most is None else most
    return minimum, maximum


def _workers(parameters: Parameters, name: str) -> int | None:
    """A number of workers; -1 is the vendor's word for a missing one."""
    value = _number(parameters, name)
    if value is None or value == -1:
        return None
    if value < 0:
        raise bad_request(f"Parameter {name} must not be negative.")
    return value


def _number(parameters: Parameters, name: str) -> int | None:
    """An integer of 32 bits; raises BadRequestException."""
    text = parameters.text(name)
    if text is None:
        return None
    value = as_integer(text)
    if value is None:
        raise bad_request(f'parameter is invalid number.For input string: "{text[:100]}"')
    return value
