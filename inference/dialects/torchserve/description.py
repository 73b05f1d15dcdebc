"""DescribeModel: what is known of a version, and its workers as they are."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import psutil

from inference.dialects.torchserve.errors import OWN_LABEL, SCALE, TorchServeError
from inference.dialects.torchserve.management import (
    DEFAULT_DELAY_MS,
    DEFAULT_TIMEOUT_S,
    NAME,
    model_url,
)
from inference.errors import ModelNotFound
from inference.workers.versions import find_version

if TYPE_CHECKING:
    from inference.dialects.torchserve.state import State
    from inference.workers.registry import DeploymentState, WorkerState
    from inference.workers.target import Target

ALL = "all"
FIRST_ID = 9000
RETRY_TIMEOUT_S = 300


async def describe(state: State, model: str, version: str, customized: bool) -> list[dict[str, Any]]:
    """The descriptions of a version; of the default one without a version, of every one for "all". Raises ModelNotFound,
    VersionNotFound; TorchServeError for a customized description without a worker.
    """
    states = await state.services.registry.deployments()
    if version == ALL:
        found = [each for each in states if each.served_name == model]
        if not found:
            raise ModelNotFound(model)
    else:
        found = [find_version(states, model, version)]
    described = [await _description(state, each) for each in found]
    if customized and version != ALL:
        described[0]["customizedMetadata"] = _metadata(state, found[0], model)
    return described


async def _description(state: State, version: DeploymentState) -> dict[str, Any]:
    vendor_fields = version.vendor_fields.get(NAME, {})
    target = _target(state, version)
    gpu = target is not None and target.info.device != "cpu"
    admission = state.services.admission
    waiting = 0 if target is None else sum(client.stats.waiting for client in target.clients.values())
    return {
        "modelName": version.served_name,
        "modelVersion": version.label,
        "modelUrl": model_url(version),
        "runtime": vendor_fields.get("runtime", "python"),
        "minWorkers": version.min_workers,
        "maxWorkers": version.max_workers,
        "batchSize": vendor_fields.get("batchSize", 1),
        "maxBatchDelay": vendor_fields.get("maxBatchDelay", DEFAULT_DELAY_MS),
        "responseTimeout": vendor_fields.get("responseTimeout", DEFAULT_TIMEOUT_S),
        "startupTimeout": vendor_fields.get("startupTimeout", DEFAULT_TIMEOUT_S),
        "maxRetryTimeoutInSec": RETRY_TIMEOUT_S,
        "clientTimeoutInMills": 0,
        "parallelType": "",
        "parallelLevel": 1,
        "deviceType": "" if target is None else "gpu" if gpu else "cpu",
        "continuousBatching": True,
        "useJobTicket": False,
        "useVenv": False,
        "stateful": False,
        "sequenceMaxIdleMSec": 0,
        "sequenceTimeoutMSec": 0,
        "maxNumSequence": 0,
        "maxSequenceJobQueueSize": 0,
        "loadedAtStartup": NAME not in version.vendor_fields,
        "workers": await asyncio.to_thread(_workers, list(version.workers), gpu),
        "jobQueueStatus": {
            "remainingCapacity": max(0, admission.max_concurrent_requests - admission.in_flight),
            "pendingRequests": waiting,
        },
    }


def _workers(workers: list[WorkerState], gpu: bool) -> list[dict[str, Any]]:
    return [
        {
            "id": str(FIRST_ID + worker.index),
            "startTime": datetime.fromtimestamp(worker.started, UTC)
            .isoformat(timespec="milliseconds")
            .replace("+00:00", "Z"),
            "status": "READY" if worker.state == "ready" else "UNLOADING",
            "memoryUsage": 0 if worker.process_id is None else _memory_bytes(worker.process_id),
            "pid": worker.process_id or -1,
            "gpu": gpu,
            "gpuUsage": "N/A",
        }
        for worker in workers
    ]


def _memory_bytes(process_id: int) -> int:
    try:
        return int(psutil.Process(process_id).memory_info().rss)
    except psutil.Error:  # it has ended
        return 0


def _target(state: State, version: DeploymentState) -> Target | None:
    return next((each for each in state.services.router.targets if each.entry.name == version.name), None)


def _metadata(state: State, version: DeploymentState, model: str) -> dict[str, Any]:
    """What a handler would say of itself: the model's limits and adapters."""
    target = _target(state, version)
    if target is None or not target.responsive:
        text = f'Model "{model[:200]}" has no worker to serve describe request. {SCALE}'
        raise TorchServeError(text, "INTERNAL", OWN_LABEL, 503, "ServiceUnavailableException")
    info = target.info
    return {
        "max_model_len": info.max_model_len,
        "dtype": info.dtype,
        "device": info.device,
        "adapters": [adapter.name for adapter in target.entry.adapters],
    }
