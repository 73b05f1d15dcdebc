"""The other endpoints of the management plane: info, config, status, metrics, stop, role."""

from __future__ import annotations

import asyncio
import ipaddress
from typing import TYPE_CHECKING, Any

from inference.dialects.mindie import health
from inference.dialects.mindie.answer import body_of
from inference.dialects.mindie.errors import MindieError
from inference.dialects.mindie.queries import VERSION, path_target
from inference.errors import Unavailable
from inference.http.exchange import Response, json_response

if TYPE_CHECKING:
    from inference.dialects.mindie.state import MindieState
    from inference.http.exchange import Exchange
    from inference.services import Services
    from inference.workers.target import Target

POLL_S = 0.1
FORCE_AFTER_S = 5.0
NOT_SET = "Environment variable MIES_SERVICE_MONITOR_MODE is not set."
ROLE_TYPE = "Input validation error"
BAD_ROLE_BODY = "Req body converts to json fail. Reset to previous node status."
NO_TRANSFER = "Update pd info failed. Reset to previous node status."
NO_TRANSFER_V2 = "Parse req json failed. Reset to previous node status."


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
    """GET /v2/models/{model}/getSlotCount."""
    health.check(services, state)
    load = Load(path_target(exchange, state), state)
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
    await exchange.respond(json_response(_status(Load(state.router.resolve(None), state))))


async def status_v2(exchange: Exchange, services: Services, state: MindieState) -> None:
    """GET /v2/status: with a [rank, free blocks] pair for the one data-parallel rank."""
    health.check(services, state)
    load = Load(state.router.resolve(None), state)
    value = _status(load)
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


async def role(exchange: Exchange, services: Services, state: MindieState) -> None:
    """POST /v1/role/{role}: prefill/decode disaggregation is not implemented, so the role stays `none`."""
    body = await _role_body(exchange, state)
    peers = body.get("peers") or []
    nodes = [body.get("local"), *(peers if isinstance(peers, list) else [None])]
    if not all(_is_node(node, "device") for node in nodes):
        raise MindieError(422, BAD_ROLE_BODY, ROLE_TYPE)
    raise MindieError(503, NO_TRANSFER)


async def role_v2(exchange: Exchange, services: Services, state: MindieState) -> None:
    """POST /v2/role/{role}: version 1 for instances that span several nodes."""
    body = await _role_body(exchange, state)
    local, peers = body.get("local"), body.get("peers") or []
    if not isinstance(local, list) or not isinstance(peers, list) or not all(isinstance(p, list) for p in peers):
        raise MindieError(503, NO_TRANSFER_V2)
    if not local or not all(_is_node(node, "dp_inst_list") for nodes in (local, *peers) for node in nodes):
        raise MindieError(422, BAD_ROLE_BODY, ROLE_TYPE)
    raise MindieError(503, NO_TRANSFER)


async def _role_body(exchange: Exchange, state: MindieState) -> dict[str, Any]:
    try:
        return await body_of(exchange, state)
    except MindieError as error:
        raise MindieError(422, BAD_ROLE_BODY, ROLE_TYPE) from error


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


def _status(load: Load) -> dict[str, Any]:
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
    return {
        "service": {"roleStatus": "RoleReady", "currentRole": "none"},
        "resource": resource,
        "linkStatus": {"peers": []},
    }


def _is_node(node: Any, devices_key: str) -> bool:
    """Whether a node of a role's body has the fields that both versions require."""
    if not isinstance(node, dict) or not _is_address(node.get("server_ip")):
        return False
    listed = node.get(devices_key)
    if not isinstance(listed, list) or not listed:
        return False
    if ("id" in node) != ("host_ip" in node) and devices_key == "device":
        return False
    percentage = node.get("p_percentage", 0)
    if isinstance(percentage, bool) or not isinstance(percentage, int) or not 0 <= percentage <= 100:
        return False
    if devices_key == "dp_inst_list":
        return all(
            isinstance(item, dict) and isinstance(item.get("dp_inst_id"), int) and _are_devices(item.get("device"))
            for item in listed
        )
    return _are_devices(listed)


def _are_devices(devices: Any) -> bool:
    return (
        isinstance(devices, list)
        and bool(devices)
        and all(
            isinstance(device, dict)
            and _is_number(device.get("device_id"))
            and _is_number(device.get("device_logical_id"))
            and _is_address(device.get("device_ip"))
            and all(_is_number(device.get(key, "0")) for key in ("rank_id", "super_device_id"))
            for device in devices
        )
    )


def _is_number(value: Any) -> bool:
    """Whether the value is a number written as a string."""
    return isinstance(value, str) and value.isascii() and value.isdigit()


def _is_address(value: Any) -> bool:
    try:
        return isinstance(value, str) and ipaddress.IPv4Address(value) is not None
    except ValueError:
        return False
