"""API keys where they are required."""

from __future__ import annotations

import subprocess
import sys

import grpc
import pytest

from tests import calls
from tests.conftest import ROOT
from tests.live import LiveServer, wait_until


@pytest.fixture(scope="module")
def guarded(tmp_path_factory):
    live = LiveServer(tmp_path_factory.mktemp("guarded") / "var", environment={"DRAGOMAN_REQUIRE_API_KEY": "true"})
    live.start()
    yield live
    assert live.stop() == 0


def create_key(live, *arguments) -> str:
    import os

    environment = {**os.environ, "DRAGOMAN_DATA_DIR": str(live.data_dir)}
    command = [sys.executable, "-W", "ignore", "manage.py", "createkey", "tester", *arguments]
    return subprocess.run(command, cwd=ROOT, env=environment, check=True, capture_output=True, text=True).stdout.strip()


def bearer(key):
    return {"authorization": f"Bearer {key}"}


def test_without_a_key_nothing_but_health_and_docs(guarded):
    table = guarded.get("/openapi.json").json()["paths"]
    public = {
        "/",
        "/health",
        "/ping",
        "/version",
        "/v2/health/live",
        "/v2/health/ready",
        "/docs",
        "/docs/{name}",
        "/openapi.json",
        "/docs/",
        "/api-doc/openapi.json",
    }
    for path, methods in table.items():
        for method in methods:
            if (method == "get" and path in public) or (method, path) == ("post", "/ping"):
                continue
            answer = guarded.post(path, {}) if method == "post" else guarded.get(path)
            assert answer.status_code == 401, path
    assert guarded.get("/v1/models").json() == {"error": "Unauthorized"}


def test_a_key_opens_what_its_scopes_say(guarded):
    key = create_key(guarded)
    wait_until(lambda: guarded.get("/v1/models", headers=bearer(key)).status_code == 200)
    ask = {"prompt": "x", "max_tokens": 1}
    assert guarded.post("/v1/completions", ask, headers=bearer(key)).status_code == 200
    assert guarded.get("/metrics", headers=bearer(key)).status_code == 403
    scraper = create_key(guarded, "--scope", "metrics")
    wait_until(lambda: guarded.get("/metrics", headers=bearer(scraper)).status_code == 200)
    assert guarded.get("/v1/models", headers=bearer(scraper)).status_code == 403
    assert key not in guarded.log


def test_changes_need_the_scope_manage(guarded):
    key, manager = create_key(guarded), create_key(guarded, "--scope", "manage")
    load = {"lora_name": "x", "lora_path": "/nowhere"}
    wait_until(lambda: guarded.post("/v1/load_lora_adapter", load, headers=bearer(manager)).status_code == 404)
    for path in ("/v1/load_lora_adapter", "/v1/unload_lora_adapter", "/v2/repository/index",
                 "/v2/repository/models/demo/unload"):  # fmt: skip
        assert guarded.post(path, load, headers=bearer(key)).status_code == 403, path
    assert guarded.post("/v2/repository/index", "", headers=bearer(manager)).status_code == 200
    assert guarded.post("/v1/completions", {"prompt": "x"}, headers=bearer(manager)).status_code == 403


def test_mindies_planes(guarded):
    key, manager = create_key(guarded), create_key(guarded, "--scope", "manage")
    wait_until(lambda: calls.get(f"{guarded.mindie_url}/v2", headers=bearer(key)).status_code == 200)
    for url in (f"{guarded.mindie_url}/v2", f"{guarded.management_url}/stopService", f"{guarded.metrics_url}/metrics"):
        answer = calls.get(url)
        assert (answer.status_code, answer.json()["error_type"]) == (401, "Unauthorized")
    assert calls.get(f"{guarded.management_url}/stopService", headers=bearer(key)).status_code == 403
    assert calls.get(f"{guarded.management_url}/v1/status", headers=bearer(manager)).status_code == 200


def test_grpc(guarded):
    key = create_key(guarded)
    wait_until(lambda: guarded.get("/v1/models", headers=bearer(key)).status_code == 200)
    with grpc.insecure_channel(f"127.0.0.1:{guarded.grpc_port}") as channel:

        def call(method, *metadata):
            return channel.unary_unary(f"/inference.GRPCInferenceService/{method}")(b"", metadata=metadata, timeout=60)

        assert call("ServerLive") == b"\x08\x01"
        for method in ("ModelInfer", "RepositoryIndex", "ServerMetadata"):
            with pytest.raises(grpc.RpcError) as refused:
                call(method)
            assert refused.value.code() == grpc.StatusCode.UNAUTHENTICATED
        good = ("authorization", f"Bearer {key}")
        assert call("ServerMetadata", good)
        with pytest.raises(grpc.RpcError) as refused:
            call("RepositoryIndex", good)
        assert refused.value.code() == grpc.StatusCode.PERMISSION_DENIED
        stream = channel.stream_stream("/inference.GRPCInferenceService/ModelStreamInfer")
        with pytest.raises(grpc.RpcError) as refused:
            list(stream(iter([b""]), timeout=60))
        assert refused.value.code() == grpc.StatusCode.UNAUTHENTICATED


@pytest.mark.parametrize("header", ["", "Bearer", "Bearer nope", "Basic eDp5", "Bearer a.b", "Bearer " + "x" * 5000])
def test_bad_keys(guarded, header):
    answer = guarded.get("/info", headers={"authorization": header})
    assert answer.status_code == 401
    assert answer.json()["error_type"] == "unauthorized"
