"""MindIE's planes as config.json sets them: one port or three, mutual TLS, limits, the end of the service."""

from __future__ import annotations

import json
import socket
import ssl
import threading
import time

import httpx
import pytest

from tests import calls
from tests.conftest import DEMO
from tests.dialects.mindie.config_file import write
from tests.dialects.mindie.test_tls import authorities
from tests.live import LiveServer, free_port, wait_until

pytestmark = [pytest.mark.full, pytest.mark.live]

PROMPT = "Question: What is the capital of Spain?\nAnswer:"


def started(tmp_path, environment=None, **changes) -> LiveServer:
    path = write(tmp_path, **changes)
    environment = {"DRAGOMAN_MINDIE_CONFIG": str(path), **(environment or {})}
    return LiveServer(tmp_path / "var", environment=environment).start()


@pytest.fixture(scope="module")
def one_port(tmp_path_factory):
    """All three planes on one port, MindIE's switches on, small limits."""
    port = free_port()
    server = started(
        tmp_path_factory.mktemp("one"),
        {"MIES_SERVICE_MONITOR_MODE": "1", "MINDIE_LLM_BENCHMARK_ENABLE": "1"},
        server={"port": port, "managementPort": port, "metricsPort": port, "fullTextEnabled": True,
                "openAiSupport": "openai", "maxRequestLength": 1},
    )  # fmt: skip
    yield server, f"http://127.0.0.1:{port}"
    assert server.stop() == 0, server.log


def test_one_port_serves_all_rows(one_port):
    _, url = one_port
    for path in ("/v1/models", "/v2", "/v2/models/llama_65b/config", "/v2/health/ready", "/v1/status", "/metrics"):
        assert calls.get(url + path).status_code == 200, path
    assert calls.get(url + "/nothing").content == b""


def test_the_files_numbers_are_told(one_port):
    _, url = one_port
    config = calls.get(f"{url}/v1/config").json()
    assert (config["modelName"], config["maxSeqLen"], config["maxOutputLen"]) == ("llama_65b", 512, 64)
    info = calls.get(f"{url}/info").json()
    assert (info["max_input_length"], info["max_concurrent_requests"], info["max_batch_total_tokens"]) == (400, 16, 400)


def test_only_the_files_adapters_are_listed(one_port):
    """Not those that the demo model comes with."""
    _, url = one_port
    assert [card["id"] for card in calls.get(f"{url}/v1/models").json()["data"]] == ["llama_65b"]
    assert calls.get(f"{url}/v2/models/llama_65b/config").json()["model_weight_path"] == DEMO.name


def test_the_files_limits_hold(one_port):
    _, url = one_port
    body = {"model": "llama_65b", "prompt": PROMPT, "ignore_eos": True}
    assert calls.post(f"{url}/v1/completions", json=body).json()["usage"]["completion_tokens"] == 64
    answer = calls.post(f"{url}/infer", json={"input_id": [5] * 401})
    assert "cannot be greater than 400,the input ids length is 401" in answer.json()["error"]
    answer = calls.post(f"{url}/infer", content=b" " * ((1 << 20) + 1))
    assert answer.json() == {"message": "Request body too large. Maximum allowed size is 1MB."}


def test_openais_own_flavour(one_port):
    _, url = one_port
    body = {"model": "llama_65b", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 1}
    for fields, error in (
        ({"temperature": 2.1}, "Parameter temperature must be in (0.0,2], got 2.1."),
        ({"top_k": -1}, "Parameter top_k must be in -1 || (0,2147483647], got -1"),
        ({"model": "x"}, "Got model x, but not found in server"),
    ):
        assert calls.post(f"{url}/v1/chat/completions", json={**body, **fields}).json()["error"] == error
    assert calls.post(f"{url}/v1/chat/completions", json={**body, "top_k": 0}).status_code == 200


def test_full_text_and_benchmark_switches(one_port):
    _, url = one_port
    body = {"text_input": PROMPT, "parameters": {"max_new_tokens": 7}}
    frames = calls.post(f"{url}/v2/models/llama_65b/generate_stream", json=body).text.split("\n\n")[:-1]
    texts = [json.loads(frame.removeprefix("data:"))["text_output"] for frame in frames]
    assert texts[-1] == " The capital of Spain is Madrid."
    assert all(texts[-1].startswith(text) for text in texts)
    chat = {"model": "llama_65b", "messages": [{"role": "user", "content": "Hello"}]}
    answer = calls.post(f"{url}/v1/chat/completions", json=chat).json()
    assert len(answer["usage"]["batch_size"]) == len(answer["usage"]["queue_wait_time"]) > 0
    assert isinstance(answer["prefill_time"], int)
    assert isinstance(answer["decode_time_arr"], list)


def test_metrics(one_port):
    _, url = one_port
    calls.post(f"{url}/infer", json={"inputs": "a", "parameters": {"max_new_tokens": 2}})
    calls.post(f"{url}/infer", json={})
    page = calls.get(f"{url}/metrics")
    assert page.headers["content-type"] == "text/plain; charset=utf-8"
    names = {line.split(" ")[2] for line in page.text.splitlines() if line.startswith("# TYPE")}
    assert names == {
        "request_received_total", "request_success_total", "request_failed_total", "num_requests_running",
        "num_requests_waiting", "num_requests_swapped", "avg_prompt_throughput_toks_per_s",
        "avg_generation_throughput_toks_per_s", "failed_request_perc", "prompt_tokens_total", "generation_tokens_total",
        "num_preemptions_total", "npu_cache_usage_perc", "cpu_cache_usage_perc", "npu_prefix_cache_hit_rate",
        "all_radix_match_num", "npu_radix_match_hit_num", "time_to_first_token_seconds", "time_per_output_token_seconds",
        "e2e_request_latency_seconds", "request_prompt_tokens", "request_generation_tokens",
    }  # fmt: skip
    assert all('model_name="llama_65b"' in line for line in page.text.splitlines() if not line.startswith("#"))
    assert "_created" not in page.text
    values = dict(line.rsplit(" ", 1) for line in page.text.splitlines() if not line.startswith("#"))
    label = '{model_name="llama_65b"}'
    received, failed = (float(values[f"request_{name}_total{label}"]) for name in ("received", "failed"))
    assert failed >= 1
    assert float(values[f"failed_request_perc{label}"]) == pytest.approx(failed / received)


def test_slots_that_are_full_refuse_adapters(one_port):
    _, url = one_port
    answer = calls.post(f"{url}/v1/load_lora_adapter", json={"lora_name": "a", "lora_path": "/x"})
    assert answer.text == (
        "Call to load LoRA method failed:The number of LoRA adapters exceeds 'max_loras', and none are currently "
        "unloading."
    )


def context(trusted, issuer=None):
    made = ssl.create_default_context()
    trusted.configure_trust(made)
    if issuer is not None:
        issuer.issue_cert("client").configure_cert(made)
    return made


def test_mutual_tls(tmp_path):
    ca, other = authorities(tmp_path)
    ports = {"port": free_port(), "managementPort": free_port(), "metricsPort": free_port()}
    server = started(tmp_path, server={**ports, "httpsEnabled": True})
    try:
        good = context(ca, ca)
        for port, path in ((ports["port"], "/v2"), (ports["managementPort"], "/v1/status")):
            url = f"https://127.0.0.1:{port}{path}"
            assert httpx.get(url, verify=good).status_code == 200
            for bad in (context(ca), context(ca, other)):
                with pytest.raises((httpx.ReadError, httpx.ConnectError, httpx.RemoteProtocolError)):
                    httpx.get(url, verify=bad)
            with pytest.raises(httpx.HTTPError):
                calls.get(f"http://127.0.0.1:{port}{path}").raise_for_status()
        stream = {"inputs": PROMPT, "parameters": {"max_new_tokens": 7}}
        answer = httpx.post(f"https://127.0.0.1:{ports['port']}/generate_stream", json=stream, verify=good)
        assert '"generated_text":" The capital of Spain is Madrid."' in answer.text
    finally:
        assert server.stop() == 0, server.log


def test_a_missing_certificate_is_told_at_start(tmp_path):
    path = write(tmp_path, server={"httpsEnabled": True, "port": free_port()})
    server = LiveServer(tmp_path / "var", environment={"DRAGOMAN_MINDIE_CONFIG": str(path)}).start(wait=False)
    assert server.process.wait(60) != 0
    assert "server.key.pem: no readable private key" in server.log


UNHURRIED = {"DRAGOMAN_SPECULATIVE_TOKENS": "0"}
LONG = {"prompt": "Once", "max_tokens": 1900, "n": 4, "temperature": 1.5, "ignore_eos": True, "stream": True}
"""A stream that outlasts some calls beside it."""


def test_stop_service_drains_and_ends(tmp_path):
    server = LiveServer(tmp_path / "var", environment=UNHURRIED).start()
    streamed, stopped = [], []

    def stream():
        streamed.append(server.post("/v1/completions", LONG))

    threads = [threading.Thread(target=stream)]
    threads[0].start()
    wait_until(lambda: server.metric("vllm:num_requests_running") > 0)
    threads.append(
        threading.Thread(target=lambda: stopped.append(calls.get(f"{server.management_url}/stopService", timeout=60)))
    )
    threads[1].start()
    wait_until(lambda: calls.get(f"{server.management_url}/v2/health/ready").status_code == 503)
    refused = calls.get(f"{server.management_url}/v1/status")
    assert refused.json() == {"error": "The service has been stopped.", "error_type": "Service Unavailable"}
    refused = calls.post(f"{server.mindie_url}/infer", json={"inputs": "a"})
    assert (refused.status_code, refused.json()["error"]) == (503, "The service has been stopped")
    assert calls.get(f"{server.management_url}/health/timed").json() == {"status": "healthy"}
    assert server.post("/v1/completions", {"prompt": "a"}).status_code == 503
    again = calls.get(f"{server.management_url}/stopService")
    assert (again.status_code, again.content) == (500, b"")
    for thread in threads:
        thread.join(60)
    assert stopped[0].status_code == 200
    assert stopped[0].content == b""
    assert streamed[0].text.endswith("data: [DONE]\n\n")
    assert server.process.wait(60) == 0


def test_stop_service_goes_on_when_its_client_leaves(tmp_path):
    server = LiveServer(tmp_path / "var", environment=UNHURRIED).start()
    with server.raw("/v1/completions", LONG) as connection:
        wait_until(lambda: server.metric("vllm:num_requests_running") > 0)
        with socket.create_connection(("127.0.0.1", server.management_port)) as client:
            client.sendall(b"GET /stopService HTTP/1.1\r\nHost: localhost\r\n\r\n")
            wait_until(lambda: calls.get(f"{server.management_url}/v2/health/ready").status_code == 503)
        while connection.recv(65536):
            pass
    assert server.process.wait(60) == 0


def test_stop_service_by_force(tmp_path):
    server = LiveServer(tmp_path / "var").start()
    body = {"prompt": "Once", "max_tokens": 2000, "ignore_eos": True, "stream": True}
    with server.raw("/v1/completions", body):
        wait_until(lambda: server.metric("vllm:num_requests_running") == 1)
        begun = time.monotonic()
        answer = calls.get(f"{server.management_url}/stopService?mode=Force")
        assert (answer.status_code, answer.content) == (200, b"")
        server.process.wait(60)
        assert time.monotonic() - begun < 30


def test_planes_can_be_switched_off(tmp_path):
    server = LiveServer(tmp_path / "var", mindie_port=0, grpc_port=0).start()
    with pytest.raises(httpx.ConnectError):
        calls.get(f"{server.management_url}/health")
    assert server.stop() == 0


def test_all_planes_on_one_port(tmp_path):
    port = free_port()
    server = LiveServer(
        tmp_path / "var", front_port=port, control_port=port, mindie_port=port, management_port=port, metrics_port=port
    ).start()
    assert calls.get(f"http://127.0.0.1:{port}/v1/models").json()["data"][0]["owned_by"] == "dragoman"
    assert calls.get(f"http://127.0.0.1:{port}/v1/status").status_code == 200
    assert calls.post(f"http://127.0.0.1:{port}/infer", json={"inputs": "a"}).status_code == 200
    assert calls.get(f"http://127.0.0.1:{port}/admin/login/").status_code == 200
    assert calls.get(f"http://127.0.0.1:{port}/v2/models/demo/getSlotCount").json()["total_slots"] > 0
    stopped = calls.post(f"http://127.0.0.1:{port}/v2/models/demo/stopInfer", json={"id": "x"})
    assert stopped.json()["error"] == "RequestId is x not found."
    assert calls.get(f"http://127.0.0.1:{port}/v2/models/org/name").json() == {
        "error": "Request for unknown model: 'org/name' is not found"
    }
    assert server.stop() == 0


@pytest.mark.parametrize("truncation", [1, -1])
def test_truncation(tmp_path, truncation):
    port = free_port()
    server = started(
        tmp_path,
        server={"port": port, "managementPort": free_port(), "metricsPort": free_port()},
        deploy={"maxInputTokenLen": 5, "truncation": truncation},
    )
    body = {"inputs": PROMPT, "parameters": {"details": True, "decoder_input_details": True, "max_new_tokens": 1}}
    details = calls.post(f"http://127.0.0.1:{port}/generate", json=body).json()["details"]
    ids = server.post("/tokenize", {"prompt": PROMPT}).json()["tokens"]
    kept = [token["id"] for token in details["prefill"]]
    assert kept == (ids[-5:] if truncation == 1 else ids[:5])
    assert server.stop() == 0
