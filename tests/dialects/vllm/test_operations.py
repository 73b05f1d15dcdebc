"""GET /version, /load, POST /ping, and the routes that are refused by name."""

from __future__ import annotations

import threading

import pytest

from inference.dialects.vllm.status import REFUSED
from tests.live import wait_until


@pytest.mark.live
def test_version_and_ping(server):
    assert server.get("/version").json() == {"version": "0.1.0"}
    for answer in (server.post("/ping", ""), server.get("/ping")):
        assert (answer.status_code, answer.content) == (200, b"")


@pytest.mark.live
def test_load_counts_what_is_inside(server):
    wait_until(lambda: server.get("/load").json() == {"server_load": 0})
    body = {"prompt": "Once", "max_tokens": 1500, "ignore_eos": True}
    thread = threading.Thread(target=lambda: server.post("/v1/completions", body))
    thread.start()
    wait_until(lambda: server.get("/load").json() == {"server_load": 1})
    thread.join(60)
    wait_until(lambda: server.get("/load").json() == {"server_load": 0})


@pytest.mark.parametrize(("method", "path"), [(method, path) for method, paths in REFUSED.items() for path in paths])
def test_refused_by_name(server, method, path):
    answer = server.post(path, {"model": "demo"}) if method == "POST" else server.get(path)
    assert answer.status_code == 400
    assert path in answer.json()["error"]["message"]


@pytest.mark.live
@pytest.mark.parametrize(
    ("form", "mark"), [("TEXT", "named_metrics.kv_cache_usage_perc="), ("json", '"named_metrics"')]
)
def test_load_in_a_header(server, form, mark):
    headers = {"endpoint-load-metrics-format": form}
    for path, body in (
        ("/v1/completions", {"prompt": "a", "max_tokens": 1}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}], "max_tokens": 1}),
    ):
        told = server.post(path, body, headers=headers).headers["endpoint-load-metrics"]
        assert told.startswith(form.upper())
        assert mark in told
        assert "endpoint-load-metrics" not in server.post(path, body).headers
