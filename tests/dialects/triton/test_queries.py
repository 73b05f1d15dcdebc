"""Health, metadata, configuration, statistics, the repository, and what is refused."""

from __future__ import annotations

import pytest

from tests.live import LiveServer


@pytest.mark.live
def test_health(server):
    assert server.get("/v2/health/live").json() == {"live": True}
    assert server.get("/v2/health/ready").json() == {"ready": True}
    assert server.get("/v2/models/demo/ready").json() == {"name": "demo", "ready": True}
    assert server.get("/v2/models/demo/versions/1/ready").status_code == 200
    for path in ("/v2/models/none/ready", "/v2/models/demo/versions/2/ready"):
        answer = server.get(path)
        assert (answer.status_code, answer.json()) == (400, {"error": "Model version not ready"})


@pytest.mark.live
def test_metadata(server):
    assert "binary_tensor_data" in server.get("/v2").json()["extensions"]
    model = server.get("/v2/models/demo").json()
    assert (model["name"], model["versions"]) == ("demo", ["1"])
    config = server.get("/v2/models/demo/config").json()
    assert config["max_batch_size"] == 0
    assert {"TYPE_STRING", "TYPE_UINT32"} <= {tensor["data_type"] for tensor in config["input"]}
    assert server.get("/v2/models/json").json()["name"] == "json"
    for path in ("/v2/models/none", "/v2/models/none/config", "/v2/models/none/stats"):
        assert server.get(path).status_code == 404


@pytest.mark.live
def test_statistics(server):
    before = server.get("/v2/models/demo/stats").json()["model_stats"][0]
    server.post("/v2/models/demo/generate", {"text_input": "a", "max_tokens": 2})
    after = server.get("/v2/models/demo/stats").json()["model_stats"][0]
    assert after["inference_count"] == before["inference_count"] + 1
    assert after["inference_stats"]["compute_infer"]["ns"] > before["inference_stats"]["compute_infer"]["ns"]
    assert [row["name"] for row in server.get("/v2/models/stats").json()["model_stats"]] == ["demo"]


@pytest.mark.parametrize("kind", ["system", "cuda"])
def test_shared_memory_is_refused_by_name(server, kind):
    assert server.get(f"/v2/{kind}sharedmemory/status").json() == []
    for action in ("region/x/register", "unregister"):
        answer = server.post(f"/v2/{kind}sharedmemory/{action}", {})
        assert answer.status_code == 501
        assert "shared memory" in answer.json()["error"]


def test_unknown_routes_and_methods(server):
    assert server.get("/v2/nothing").json() == {"error": "Not Found: this server does not serve GET /v2/nothing"}
    answer = server.post("/v2/health/live", {})
    assert (answer.status_code, answer.json()) == (405, {"error": "Method Not Allowed"})


@pytest.mark.full
@pytest.mark.live
def test_load_and_unload(tmp_path):
    server = LiveServer(tmp_path / "var").start()
    index = server.post("/v2/repository/index", "").json()
    assert index == [{"name": "demo", "version": "1", "state": "READY", "reason": ""}]
    assert (
        server.post("/v2/repository/models/demo/unload", {"parameters": {"unload_dependents": False}}).status_code
        == 200
    )
    assert server.post("/v2/repository/index", {"ready": True}).json() == []
    assert server.post("/v2/models/demo/generate", {"text_input": "a"}).status_code in (404, 503)
    loaded = server.post("/v2/repository/models/demo/load", "")
    assert (loaded.status_code, loaded.content) == (200, b"")
    assert server.post("/v2/models/demo/generate", {"text_input": "a", "max_tokens": 1}).status_code == 200
    for body, path, text in (
        ({}, "none/load", "failed to load 'none'"),
        ({}, "none/unload", "failed to unload 'none'"),
        ({"parameters": {"config": "{}"}}, "demo/load", "not supported"),
        (b"[", "demo/load", "JSON"),
    ):
        answer = server.post(f"/v2/repository/models/{path}", body)
        assert answer.status_code == 400
        assert text in answer.json()["error"]
    assert server.post("/v2/repository/index", {"ready": 5}).status_code == 400
    assert server.stop() == 0
