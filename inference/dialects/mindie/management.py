"""The other endpoints of the management plane: info, config, status, metrics, stop."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from inference.dialects.mindie import health
from inference.dialects.mindie.disaggregation.roles import Role, RoleStatus
from inference.dialects.mindie.errors import MindieError
from inference.dialects.mindie.queries import VERSION
from inference.errors import Unavailable
from inference.http.exchange import Response, json_response

if TYPE_CHECKING:
    from inference.dialects.mindie.disaggregation.instance import Instance
    from inference.dialects.mindie.state import MindieState
    from inference.http.exchange import Exchange
    from inference.services import Services
    from inference.workers.target import Target

POLL_S = 0.1
FORCE_AFTER_S = 5.0
NOT_SET = "Environment variable MIES_SERVICE_MONITOR_MODE is not set."


async def info(exchange: Exchange, services: Services, state: MindieState) -> None:
    """GET /info."""
    health.check(services, state)
    target = state.router.resolve(None)
    capacity = state.capacity(target)
    models = [
        {
            "model_device_type": "npu",
            "model_dtype": each.info.dtype,
            "model_id": each.entry.name,
            "model_pipeline_tag": "text-generation",
            "model_sha": None,
            "max_total_tokens": each.info.max_model_len,
        }
        for each in state.router.targets
        if each.info.embedding is None
    ]
    value = {
        "docker_label": None,
        "max_batch_total_tokens": capacity.max_prefill_tokens,
        "max_best_of": 1,
        "max_concurrent_requests": capacity.max_batch_size,
        "max_stop_sequences": None,
        "max_waiting_tokens": None,
        "sha": None,
        "validation_workers": None,
        "version": services.version or VERSION,
        "waiting_served_ratio": None,
        "models": models,
        "max_input_length": capacity.max_input_token_len,
    }
    await exchange.respond(json_response(value))


async def slots(exchange: Exchange, services: Services, state: MindieState) -> None:
    """GET /v2/models/{model}/getSlotCount: 500 without a body for a model that has never been ready."""
    health.check(services, state)
    try:
        target = state.named(exchange.parameters["model"])
    except Unavailable:
        return await exchange.respond(Response(500, b"", b""))
    load = Load(target, state)
    value = {
        "total_slots": load.slots,
        "free_slots": load.free_slots,
        "available_tokens_length": load.free_blocks * load.block_size,
    }
    await exchange.respond(json_response(value))


async def config(exchange: Exchange, services: Services, state: MindieState) -> None:
    """GET /v1/config."""
    try:
        target = state.router.resolve(None)
    except Unavailable as error:
        text = "Failed to get modelDeployConfig, at least 1 modelDeployConfig expected."
        raise MindieError(500, text) from error
    capacity, settings = state.capacity(target), state.settings
    value = {
        "modelName": target.entry.name,
        "maxSeqLen": capacity.max_seq_len,
        "npuMemSize": settings.npu_mem_size,
        "cpuMemSize": settings.cpu_mem_size,
        "worldSize": settings.world_size,
        "maxOutputLen": capacity.max_iter_times,
        "cacheBlockSize": capacity.cache_block_size,
    }
    await exchange.respond(json_response(value))


async def status(exchange: Exchange, services: Services, state: MindieState) -> None:
    """GET /v1/status."""
    health.check(services, state)
    load = Load(state.router.resolve(None), state)
    await exchange.respond(json_response(_status(load, state.instance, by_instance=False)))


async def status_v2(exchange: Exchange, services: Services, state: MindieState) -> None:
    """GET /v2/status: with a [rank, free blocks] pair for the one data-parallel rank."""
    health.check(services, state)
    load = Load(state.router.resolve(None), state)
    value = _status(load, state.instance, by_instance=True)
    value["resource"].update(
        totalAvailNpuSlotsNum=load.free_slots,
        totalAvailNpuBlockNum=load.free_blocks,
        dpInstMap=[[0, load.free_blocks]],
        maxAvailNpuBlockNum=load.free_blocks,
    )
    await exchange.respond(json_response(value))


async def metrics_json(exchange: Exchange, services: Services, state: MindieState) -> None:
    """GET /metrics-json."""
    health.check(services, state)
    load = Load(state.router.resolve(None), state)
    values = {
        "TTFT": state.latency.first_ms,
        "TBT": state.latency.between_ms,
        "waitingInferRequestNum": load.waiting,
        "processingInferRequestNum": load.waiting + load.running,
        "remainBlocks": load.free_blocks,
    }
    instance = state.settings.management_address
    result = [
        {"metric": [{"__name__": name, "job": "node", "instance": instance}], "value": str(value)}
        for name, value in values.items()
    ]
    await exchange.respond(json_response({"resultType": "vector", "result": result}))


async def metrics(exchange: Exchange, services: Services, state: MindieState) -> None:
    """GET /metrics of the metrics plane."""
    if not state.settings.metrics_enabled:
        raise MindieError(500, NOT_SET)
    await exchange.respond(Response(200, state.metrics.render(), b"text/plain; charset=utf-8"))


async def stop_service(exchange: Exchange, services: Services, state: MindieState) -> None:
    """GET /stopService: refuse new requests, respond when the last one has ended, then exit; or exit at once if
    forced.
    """
    if state.stopping:
        return await exchange.respond(Response(500, b"", b""))
    state.stopping = services.admission.draining = True
    if b"mode=Force" in exchange.scope["query_string"].split(b"&"):
        await exchange.respond(Response(200, b"", b""))
        state.terminate(FORCE_AFTER_S)
        return None
    # A task of its own: the drain continues when this client disconnects.
    state.drain = asyncio.ensure_future(_drained(state))
    await asyncio.shield(state.drain)
    await exchange.respond(Response(200, b"", b""))
    return None


async def _drained(state: MindieState) -> None:
    """Wait for the last request, then stop the server after this response."""
    while any(client.inflight for target in state.router.targets for client in target.clients.values()):  # noqa: ASYNC110
        await asyncio.sleep(POLL_S)  # requests end in many places, and this runs only once per process
    state.terminate(None)


class Load:
    """Capacity and usage summed over a deployment's workers."""

    def __init__(self, target: Target, state: MindieState) -> None:
        stats = [client.stats for client in target.clients.values()]
        self.waiting, self.running = sum(s.waiting for s in stats), sum(s.running for s in stats)
        self.total_blocks = target.info.num_blocks * len(stats)
        self.free_blocks = self.total_blocks - sum(s.blocks_used for s in stats)
        capacity = state.capacity(target)
        self.block_size = capacity.cache_block_size
        self.slots = capacity.max_batch_size * max(1, len(stats))

    @property
    def free_slots(self) -> int:
        """Free request slots."""
        return max(0, self.slots - self.waiting - self.running)


def _status(load: Load, instance: Instance | None, by_instance: bool) -> dict[str, Any]:
    """Role, load and links; `by_instance` lists the links of version 2, which tells no percentage."""
    resource = {
        "availSlotsNum": load.free_slots,
        "availBlockNum": load.free_blocks,
        "waitingRequestNum": load.waiting,
        "runningRequestNum": load.running,
        "swappedRequestNum": 0,
        "freeNpuBlockNums": load.free_blocks,
        "freeCpuBlockNums": 0,
        "totalNpuBlockNums": load.total_blocks,
        "totalCpuBlockNums": 0,
    }
    service: dict[str, Any] = {"roleStatus": RoleStatus.READY.value, "currentRole": Role.NONE.value}
    links: list[dict[str, Any]] = []
    if instance is not None:
        roles = instance.roles
        service = {"roleStatus": roles.status.value, "currentRole": roles.role.value}
        if roles.role is Role.FLEX and not by_instance:
            service["p_percentage"] = roles.percentage
        links = roles.links(by_instance)
    return {"service": service, "resource": resource, "linkStatus": {"peers": links}}
