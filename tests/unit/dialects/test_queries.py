"""What every dialect tells without inferring: models, health, metadata, load, documentation; byte for byte."""

from __future__ import annotations

import re

import pytest

from inference.dialects.mindie.settings import MindieSettings
from tests.unit import golden
from tests.unit.scripts import EMBEDDING, says
from tests.waiting import eventually

FRONT = {
    "openai-models": "/v1/models",
    "openai-model": "/v1/models/demo",
    "openai-model-unknown": "/v1/models/none",
    "openai-response-unknown": "/v1/responses/resp_1",
    "openai-method": "/v1/completions",
    "vllm-version": "/version",
    "vllm-load": "/load",
    "tgi-info": "/info",
    "tgi-health": "/health",
    "tgi-ping": "/ping",
    "triton-server": "/v2",
    "triton-live": "/v2/health/live",
    "triton-ready": "/v2/health/ready",
    "triton-model": "/v2/models/demo",
    "triton-model-ready": "/v2/models/demo/ready",
    "triton-model-unknown": "/v2/models/none",
    "triton-config": "/v2/models/demo/config",
    "triton-server-slash": "/v2/",
    "triton-shared-memory": "/v2/systemsharedmemory/status",
    "triton-shared-memory-region": "/v2/cudasharedmemory/region/x/status",
    "triton-shared-memory-method": "/v2/systemsharedmemory/region/x/register",
    "triton-trace": "/v2/trace/setting",
    "triton-trace-model": "/v2/models/demo/trace/setting",
    "triton-trace-unknown": "/v2/models/none/trace/setting",
    "triton-logging": "/v2/logging",
    "docs": "/docs",
    "docs-unknown-asset": "/docs/nothing.js",
}
MINDIE = {
    "models": "/v1/models",
    "model": "/v1/models/demo",
    "model-unknown": "/v1/models/none",
    "server": "/v2",
    "metadata": "/v2/models/demo",
    "config": "/v2/models/demo/config",
    "model-of-version": "/v2/models/demo/versions/1",
    "dresult": "/dresult",
}
MANAGEMENT = {
    "live": "/v2/health/live",
    "ready": "/v2/health/ready",
    "model-ready": "/v2/models/demo/ready",
    "model-ready-unknown": "/v2/models/none/ready",
    "health": "/health",
    "health-timed": "/health/timed",
    "health-timed-seconds": "/health/timed-5",
    "health-timed-0": "/health/timed-0",
    "health-timed-1000": "/health/timed-1000",
    "health-timed-x": "/health/timedx",
    "info": "/info",
    "slots": "/v2/models/demo/getSlotCount",
    "service-config": "/v1/config",
    "status": "/v1/status",
    "status-v2": "/v2/status",
    "metrics-json": "/metrics-json",
    "running-status": "/v1/engine-server/running-status",
}
NODE = {"id": 1, "server_ip": "1.2.3.4", "host_ip": "1.2.3.4",
        "device": [{"device_id": "0", "device_ip": "1.2.3.4", "device_logical_id": "0"}]}  # fmt: skip
NODE_V2 = {"server_ip": "1.2.3.4", "dp_inst_list": [{"dp_inst_id": 0, "device": NODE["device"]}]}
ROLES = {
    "role": ("/v1/role/prefill", {"local": NODE}),
    "role-of-peers": ("/v1/role/decode", {"local": NODE, "peers": [NODE]}),
    "role-of-nobody": ("/v1/role/flex", {"local": {}}),
    "role-without-host": ("/v1/role/prefill", {"local": {k: v for k, v in NODE.items() if k != "host_ip"}}),
    "role-of-no-address": ("/v1/role/prefill", {"local": {**NODE, "server_ip": "x"}}),
    "role-of-a-list": ("/v1/role/prefill", []),
    "role-v2": ("/v2/role/prefill", {"local": [NODE_V2]}),
    "role-v2-percentage": ("/v2/role/prefill", {"local": [{**NODE_V2, "p_percentage": 101}]}),
    "role-v2-of-an-object": ("/v2/role/decode", {"local": NODE_V2}),
}


GONE = ("live", "health", "health-timed", "info", "status", "model-ready")
"""Of MANAGEMENT, asked again when the worker is gone."""
EMBEDDINGS = {
    path.strip("/").replace("/", "-"): path
    for path in ("/v1/models", "/info", "/v2/models/demo", "/v2/models/demo/config")
}


def goldens() -> set[str]:
    """The files that the tests here compare."""
    mindie = {f"mindie-{name}" for name in (*MINDIE, *MANAGEMENT, *ROLES)}
    return {*FRONT, *mindie, *(f"mindie-gone-{name}" for name in GONE), *(f"embedding-{name}" for name in EMBEDDINGS)}


@pytest.mark.parametrize("name", FRONT)
async def test_front(serving, name):
    golden.check(await serving.get(FRONT[name]), f"queries/{name}")


@pytest.mark.parametrize("name", MINDIE)
async def test_mindie(serving, name):
    golden.check(await serving.get(MINDIE[name], plane="mindie"), f"queries/mindie-{name}")


@pytest.mark.parametrize("name", MANAGEMENT)
async def test_mindie_management(serving, name):
    golden.check(await serving.get(MANAGEMENT[name], plane="management"), f"queries/mindie-{name}")


@pytest.mark.parametrize("name", GONE)
async def test_mindie_management_without_a_worker(serving, name):
    serving.worker.die()
    await eventually(lambda: not any(t.clients for t in serving.router.targets))
    golden.check(await serving.get(MANAGEMENT[name], plane="management"), f"queries/mindie-gone-{name}")


@pytest.mark.parametrize("name", ROLES)
async def test_mindie_roles(serving, name):
    path, body = ROLES[name]
    golden.check(await serving.post(path, body, plane="management"), f"queries/mindie-{name}")


@pytest.mark.parametrize("name", EMBEDDINGS)
async def test_embedding_models(start, name):
    golden.check(await (await start(info=EMBEDDING)).get(EMBEDDINGS[name]), f"queries/embedding-{name}")


async def test_head_has_no_body(serving):
    whole = await serving.get("/v1/models")
    head = await serving.begin("/v1/models", method="HEAD").end()
    assert (head.status, head.body) == (200, b"")
    assert head.header("content-length") == whole.header("content-length")


async def test_the_documentation_lists_every_route(serving):
    document = (await serving.get("/openapi.json")).json()
    assert document["openapi"] == "3.1.0"
    for route in serving.planes["front"].table.routes:
        operation = document["paths"][route.plain_path][route.method.lower()]
        assert operation["summary"]
        assert [p["name"] for p in operation.get("parameters", [])] == route.parameters
        assert bool(operation.get("security")) == (route.scope is not None)
    assert "anyOf" in str(document["paths"]["/invocations"])


async def test_metrics_count_what_happened(serving):
    serving.worker.scripts.append(says(" Rome."))
    await serving.post("/v1/completions", {"prompt": "The capital", "model": "demo"})
    serving.worker.scripts.append(says(" Rome."))
    await serving.post("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}], "stream": True})
    serving.worker.beat()
    await eventually(lambda: serving.router.targets[0].clients and _stats(serving).generation_tokens == 6)
    answer = await serving.get("/metrics")
    found = dict(re.findall(r"(?m)^(vllm:[a-z_]+)\{[^}]*\} ([\d.e+-]+)$", answer.text))
    assert float(found["vllm:generation_tokens_total"]) == 6
    assert float(found["vllm:num_requests_running"]) == 0
    successes = re.findall(r'vllm:request_success_total\{[^}]*finished_reason="stop"[^}]*\} ([\d.]+)', answer.text)
    assert sum(map(float, successes)) == 2
    assert "tgi_request_count" in answer.text


DASHBOARD = (
    [f"batch_{name}_duration_bucket" for name in ("inference", "forward", "decode", "filter", "concat")]
    + [f"request_{name}_bucket" for name in (
        "duration", "queue_duration", "mean_time_per_token_duration", "input_length", "generated_tokens",
        "skipped_tokens",
    )]
    + ["request_generated_tokens_sum", "request_generated_tokens_count", "request_count", "request_success",
       "queue_size", "batch_current_size", "batch_current_max_tokens", "batch_concat", "batch_next_size_bucket"]
)  # fmt: skip


@pytest.mark.parametrize("name", DASHBOARD)
async def test_what_tgis_dashboard_reads_is_there(serving, name):
    assert re.search(rf"(?m)^tgi_{name}[{{ ]", (await serving.get("/metrics")).text)


async def test_what_the_workers_counted_is_told_in_tgis_names(serving):
    (client,) = serving.router.targets[0].clients.values()
    counted = client.histograms
    counted.add_step(0.001, requests=3, prompts=2)
    counted.add_step(0.001, requests=3, prompts=0)
    counted.add_publishing(0.5, is_decode=True)
    counted.add_drafted([[1], [1, 2, 3], []])
    page = (await serving.get("/metrics")).text
    for line in (
        'tgi_batch_next_size_bucket{le="1.0"} 0.0',
        'tgi_batch_next_size_bucket{le="2.0"} 1.0',
        "tgi_batch_next_size_sum 2.0",
        'tgi_batch_concat{reason="chunking"} 1',
        'tgi_batch_concat_duration_count{method="decode"} 1.0',
        'tgi_batch_forward_duration_count{method="prefill"} 1.0',
        'tgi_batch_decode_duration_count{method="decode"} 1.0',
        'tgi_batch_filter_duration_sum{method="decode"} 0.5',
        'tgi_request_skipped_tokens_bucket{le="0.0"} 1.0',
        'tgi_request_skipped_tokens_bucket{le="2.0"} 2.0',
        "tgi_request_skipped_tokens_sum 2.0",
    ):
        assert f"\n{line}\n" in page, line


async def test_mindies_metrics(start):
    off = await start()
    assert (await off.get("/metrics", plane="metrics")).status == 500


async def test_mindies_metrics_where_they_are_on(start):
    serving = await start(mindie=MindieSettings(metrics_enabled=True))
    await serving.post("/infer", {"inputs": "The capital"}, plane="mindie")
    await serving.post("/infer", {}, plane="mindie")
    text = (await serving.get("/metrics", plane="metrics")).text
    found = dict(re.findall(r"(?m)^(\w+)(?:\{[^}]*\})? ([\d.e+-]+)$", text))
    assert float(found["request_received_total"]) == 2
    assert float(found["request_success_total"]) == 1
    assert float(found["request_failed_total"]) == 1


async def test_stop_service_drains(serving):
    answer = await serving.get("/stopService", plane="management")
    assert (answer.status, answer.body, serving.terminated) == (200, b"", [None])
    assert (await serving.get("/stopService", plane="management")).status == 500
    assert (await serving.post("/infer", {"inputs": "a"}, plane="mindie")).status == 503
    assert (await serving.get("/health/timed", plane="management")).body == b'{"status":"healthy"}'


async def test_stop_service_by_force(serving):
    assert (await serving.get("/stopService?mode=Force", plane="management")).status == 200
    assert serving.terminated == [5.0]


def _stats(serving):
    (target,) = serving.router.targets
    (client,) = target.clients.values()
    return client.stats


async def test_mindies_weights_are_the_last_part_of_their_path(start):
    serving = await start(mindie=MindieSettings(model_weights=("demo", "llama2-7b")))
    answer = await serving.get("/v2/models/demo/config", plane="mindie")
    assert answer.json()["model_weight_path"] == "llama2-7b"


COMMAND = "/v1/engine-server/fault-handling-command"


@pytest.mark.parametrize(
    ("body", "status", "found"),
    [
        ({"cmd": 0}, 200, {"status": False, "message": "The engine cannot be paused.", "reason": []}),
        ({"cmd": 3}, 200, {"status": False, "message": "The engine cannot be paused.", "reason": []}),
        *(({"cmd": cmd}, 400, "Command is not consistent with current status.") for cmd in (-1, 1, 2, 4, 1 << 70)),
        *((body, 422, "cmd_type must be necessary") for body in ({}, {"cmd": None}, {"cmd": "0"}, [], b"{")),
    ],
)
async def test_mindies_fault_commands(serving, body, status, found):
    answer = await serving.post(COMMAND, body, plane="management")
    assert answer.status == status
    if status == 200:
        assert answer.json() == found
    else:
        assert found in answer.json()["error"]
        assert answer.json()["error_type"] == {400: "Bad Request", 422: "Input Validation Error"}[status]
    assert (await serving.get("/v1/engine-server/running-status", plane="management")).json()["status"] == 1


async def test_mindies_status_without_a_worker(start):
    serving = await start(count=0)
    page = await serving.get("/v1/engine-server/running-status", plane="management")
    assert page.json() == {"status": 4, "errors": []}
    assert (await serving.post(COMMAND, {"cmd": 0}, plane="management")).status == 400
