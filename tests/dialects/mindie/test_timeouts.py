"""MindIE's timers: the whole request's, the server's and the client's own between two tokens."""

from __future__ import annotations

import pytest

from tests import calls
from tests.dialects.mindie.config_file import write
from tests.live import LiveServer, free_port, wait_until

pytestmark = [pytest.mark.full, pytest.mark.live]

LONG = {"model": "llama_65b", "prompt": "Once", "ignore_eos": True}


@pytest.fixture(scope="module")
def hasty(tmp_path_factory):
    folder = tmp_path_factory.mktemp("hasty")
    port = free_port()
    path = write(
        folder,
        server={"port": port, "managementPort": port, "metricsPort": port, "e2eTimeout": 1},
        deploy={"maxSeqLen": 2048},
        schedule={"maxIterTimes": 2000},
    )
    environment = {"DRAGOMAN_MINDIE_CONFIG": str(path), "DRAGOMAN_SPECULATIVE_TOKENS": "0"}
    server = LiveServer(folder / "var", environment=environment).start()
    yield server, f"http://127.0.0.1:{port}"
    assert server.stop() == 0


def test_the_whole_request(hasty):
    server, url = hasty
    body = {**LONG, "temperature": 5.0, "n": 8, "seed": 1}
    answer = calls.post(f"{url}/v1/completions", json=body, timeout=60)
    assert answer.status_code == 500
    assert answer.json() == {
        "error": "Engine callback timeout: server e2eTimeout",
        "error_type": "Incomplete Generation",
    }
    server.wait_idle()


def test_a_stream_ends_with_bare_text(hasty):
    server, url = hasty
    body = {**LONG, "temperature": 5.0, "n": 8, "seed": 1, "stream": True}
    text = calls.post(f"{url}/v1/completions", json=body, timeout=60).text
    assert text.endswith("\n\nEngine callback timeout: server e2eTimeout")
    assert "[DONE]" not in text
    server.wait_idle()


def test_requests_in_time_are_left_alone(hasty):
    _, url = hasty
    answer = calls.post(f"{url}/infer", json={"inputs": "a", "parameters": {"timeout": 1, "max_new_tokens": 2}})
    assert answer.status_code == 200


def test_the_clients_own_timer(hasty):
    """While a worker is stopped no token comes."""
    server, url = hasty
    (worker,) = server.workers()
    worker.suspend()
    try:
        body = {"inputs": "a", "parameters": {"timeout": 1, "max_new_tokens": 2}}
        answer = calls.post(f"{url}/infer", json=body, timeout=60)
        assert answer.status_code == 500
        assert answer.json()["error"].startswith("Engine callback timeout: ")
    finally:
        worker.resume()
    wait_until(lambda: calls.get(f"{url}/health").status_code == 200)
