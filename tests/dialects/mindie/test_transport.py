"""What all rows share: methods, unknown paths, ids, depth, size, types of bodies."""

from __future__ import annotations

import json
import socket
import time

import pytest

from tests import calls
from tests.live import wait_until

pytestmark = pytest.mark.live


@pytest.mark.parametrize(("method", "path"), [("GET", "/nothing"), ("GET", "/infer"), ("PUT", "/infer"),
                                              ("POST", "/v1/models"), ("GET", "/v2/models/a/b"), ("GET", "/metrics")])  # fmt: skip
def test_what_is_not_there_is_a_bare_404(mindie, method, path):
    answer = calls.request(method, mindie.server.mindie_url + path)
    assert (answer.status_code, answer.content) == (404, b"")
    assert len(answer.headers["RequestUUID"]) == 32


def test_ten_levels_below_the_body_and_no_more(mindie):
    for levels, status in ((10, 200), (11, 422)):
        deep = "[" * levels + "]" * levels
        body = f'{{"inputs":"a","parameters":{{"max_new_tokens":1}},"x":{deep}}}'
        assert mindie.post("/infer", body).status_code == status


def test_bodies_up_to_40_mib(mindie):
    big = b'{"inputs":"a","parameters":{"max_new_tokens":1},"x":"' + b"x" * (3 << 20) + b'"}'
    assert mindie.post("/infer", big).status_code == 200
    answer = mindie.post("/infer", b" " * ((40 << 20) + 1))
    assert answer.status_code == 413
    assert answer.content == b'{"message":"Request body too large. Maximum allowed size is 40MB."}'
    assert len(answer.headers["RequestUUID"]) == 32


def test_millions_of_elements_are_refused_at_once(mindie):
    begun = time.monotonic()
    assert mindie.post("/infer", b'{"x":[' + b"[]," * 10_000_000 + b"[]]}").status_code == 422
    quotes = b'{"inputs":"a","parameters":{"max_new_tokens":1},"x":"' + b'\\"' * 15_000_000 + b'"}'
    assert mindie.post("/infer", quotes).status_code == 200
    assert time.monotonic() - begun < 60


def test_an_id_that_runs_is_refused(mindie):
    body = {
        "model": "demo",
        "prompt": "Once",
        "max_tokens": 1900,
        "ignore_eos": True,
        "stream": True,
        "temperature": 5.0,
    }
    headers = {"req-id": "twice"}
    with calls.stream("POST", f"{mindie.server.mindie_url}/v1/completions", json=body, headers=headers) as running:
        lines = running.iter_lines()  # a stream ends with its iterator
        next(lines)
        answer = mindie.post("/v1/completions", {**body, "stream": False}, headers=headers)
    assert answer.status_code == 500
    assert answer.json()["error"] == "Failed to enqueue inferRequest. Runtime request has been used before."
    mindie.server.wait_idle()


def test_no_decode_results(mindie):
    answer = mindie.get("/dresult")
    assert answer.status_code == 400
    assert answer.content == b'{"error":"Non DMI does not support dresult request","error_type":"Bad Request"}'


@pytest.mark.parametrize("kind", ["application/x-www-form-urlencoded", "text/plain", "image/png", ""])
def test_content_type_and_accept_say_nothing(mindie, kind):
    headers = {"content-type": kind, "accept": "image/png"}
    answer = mindie.post("/infer", {"inputs": "a", "parameters": {"max_new_tokens": 1}}, headers=headers)
    assert answer.status_code == 200


def test_metrics_need_the_environment_variable(mindie):
    answer = calls.get(f"{mindie.server.metrics_url}/metrics")
    assert answer.status_code == 500
    assert answer.content == (
        b'{"error":"Environment variable MIES_SERVICE_MONITOR_MODE is not set.","error_type":"Incomplete Generation"}'
    )


def test_disconnects_abort(mindie):
    body = json.dumps({"prompt": "Once", "model": "demo", "max_tokens": 2000, "ignore_eos": True})
    for stream in ("false", "true"):
        content = f'{body[:-1]}, "stream": {stream}}}'
        head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(content)}\r\n\r\n"
        before = mindie.server.metric("vllm:request_success_total", finished_reason="abort")
        with socket.create_connection(("127.0.0.1", mindie.server.mindie_port)) as connection:
            connection.sendall((head + content).encode())
            wait_until(lambda: mindie.server.metric("vllm:num_requests_running") > 0)
        mindie.server.wait_idle()
        assert mindie.server.metric("vllm:request_success_total", finished_reason="abort") == before + 1


def test_status_lines(mindie):
    """The phrases of the vendor's server; Twisted knows none for 422 and 424."""
    many = {"input_id": [5] * 5000}
    for path, body, status, phrase in (
        ("/infer", {}, 422, "Unprocessable Content"),
        ("/infer", many, 424, "Failed Dependency"),
        ("/v2/models/x/infer", {}, 404, "Not Found"),
        ("/infer", b" " * ((40 << 20) + 1), 413, "Payload Too Large"),
        ("/infer", {"inputs": "a", "parameters": {"max_new_tokens": 1}}, 200, "OK"),
    ):
        answer = mindie.post(path, body)
        assert (answer.status_code, answer.reason_phrase) == (status, phrase)
    elsewhere = calls.post(f"{mindie.server.url}/generate", json={})
    assert (elsewhere.status_code, elsewhere.reason_phrase) == (422, "Unprocessable Entity")
