"""What the management API says about models: lists with paging, and the description of a model with its workers."""

from __future__ import annotations

from datetime import UTC, datetime
from itertools import groupby
from typing import TYPE_CHECKING, Any

from inference.dialects.djl.errors import not_found
from inference.dialects.djl.models import NAME, states_of, target_of
from inference.dialects.djl.parameters import read_parameters
from inference.vendors.model_server import pretty

if TYPE_CHECKING:
    from inference.http.exchange import Exchange
    from inference.services import Services
    from inference.workers.registry import DeploymentState

STATUS = {"ready": "READY", "failed": "FAILED"}
DEFAULTS = {"batch_size": 1, "max_batch_delay": 100, "max_idle_time": 60, "job_queue_size": 1000}
"""Figures of a model that a client may register, with the vendor's defaults. They are returned and have no effect."""


async def list_models(exchange: Exchange, services: Services) -> None:
    """GET /models."""
    states = await _by_name(services)
    first, end = (await read_parameters(exchange)).page(len(states))
    models = [
        {"modelName": name, "version": state.label, "modelUrl": state.source, "status": status_of(state)}
        for name, versions in states[first:end]
        for state in versions
    ]
    token = {"nextPageToken": str(end)} if end < len(states) else {}
    await exchange.respond(pretty({**token, "models": models}))


async def list_workflows(exchange: Exchange, services: Services) -> None:
    """GET /workflows: every model is a workflow. As in DJL Serving, the last page has a token too."""
    states = await _by_name(services)
    first, end = (await read_parameters(exchange)).page(len(states))
    workflows = [
        {"workflowName": name, "version": state.label} for name, versions in states[first:end] for state in versions
    ]
    await exchange.respond(pretty({"nextPageToken": str(end), "workflows": workflows}))


async def describe(exchange: Exchange, services: Services) -> None:
    """GET /models/{model} and /models/{model}/{version}, also under /workflows: a list with one entry for each version."""
    name, version = exchange.parameters["model"], exchange.parameters.get("version", "")
    found = states_of(await services.registry.deployments(), name, version)
    if not found:
        raise not_found(f"Workflow not found: {name}/{version}" if version else f"Workflow not found: {name}")
    await exchange.respond(pretty([_workflow(services, state) for state in found]))


def status_of(state: DeploymentState) -> str:
    """READY, FAILED, or PENDING for all that cannot take requests yet. Workers are ready a moment before the state says so."""
    if state.state == "starting" and ready_workers(state):
        return "READY"
    return STATUS.get(state.state, "PENDING")


def health_of(state: DeploymentState) -> str:
    """A ready model is healthy when all the workers that it should have are ready."""
    status = status_of(state)
    if status != "READY":
        return status
    return "Healthy" if ready_workers(state) >= state.wanted_workers else "Unhealthy"


async def _by_name(services: Services) -> list[tuple[str, list[DeploymentState]]]:
    """The versions of each model, by its name."""
    states = sorted(await services.registry.deployments(), key=lambda state: state.served_name)
    return [(name, list(versions)) for name, versions in groupby(states, key=lambda state: state.served_name)]


def _workflow(services: Services, state: DeploymentState) -> dict[str, Any]:
    vendor_fields = state.vendor_fields.get(NAME)
    figures = {**DEFAULTS, **(vendor_fields if isinstance(vendor_fields, dict) else {})}
    entry = next((each for each in services.holder.current.deployments if each.name == state.name), None)
    target = None if entry is None else target_of(services, entry)
    clients = [] if target is None else list(target.clients.values())
    gpu = target is not None and target.info.device.startswith("cuda")
    group = {
        "device": {"deviceType": "gpu" if gpu else "cpu", "deviceId": 0 if gpu else -1},
        "minWorkers": state.min_workers,
        "maxWorkers": state.max_workers,
        "workers": [
            {
                "id": worker.index + 1,
                "startTime": datetime.fromtimestamp(worker.started, UTC).isoformat(timespec="milliseconds"),
                "status": "READY" if worker.state == "ready" else "UNLOADING",
            }
            for worker in state.workers
        ],
    }
    model = {
        "modelName": state.served_name,
        "modelUrl": state.source,
        "batchSize": figures["batch_size"],
        "maxBatchDelayMillis": figures["max_batch_delay"],
        "maxIdleSeconds": figures["max_idle_time"],
        "queueSize": figures["job_queue_size"],
        "requestInQueue": sum(client.stats.waiting for client in clients),
        "status": health_of(state),
        "loadedAtStartup": vendor_fields is None,
        "workerGroups": [group],
    }
    return {"workflowName": state.served_name, "version": state.label, "models": [model]}


def ready_workers(state: DeploymentState) -> int:
    """How many of its workers can take requests."""
    return sum(worker.state == "ready" for worker in state.workers)
