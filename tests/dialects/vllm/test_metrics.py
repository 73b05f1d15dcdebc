"""GET /metrics: vLLM's families, and their exact counts after requests one by one."""

from __future__ import annotations

import pytest

from tests.live import LiveServer, wait_until

pytestmark = [pytest.mark.full, pytest.mark.live]

NAMES = [
    "num_requests_running", "num_requests_waiting", "num_requests_waiting_by_reason", "kv_cache_usage_perc",
    "engine_sleep_state", "lora_requests_info", "cache_config_info", "prefix_cache_queries_total",
    "prefix_cache_hits_total", "num_preemptions_total", "prompt_tokens_total", "generation_tokens_total",
    "prompt_tokens_cached_total", "request_success_total", "iteration_tokens_total_bucket",
    "request_prompt_tokens_sum", "request_generation_tokens_count", "request_params_max_tokens_sum",
    "request_max_num_generation_tokens_sum", "request_prefill_kv_computed_tokens_sum", "request_params_n_count",
    "time_to_first_token_seconds_bucket", "inter_token_latency_seconds_bucket",
    "request_time_per_output_token_seconds_count", "e2e_request_latency_seconds_count", "request_queue_time_seconds_sum",
    "request_inference_time_seconds_count", "request_prefill_time_seconds_count", "request_decode_time_seconds_count",
    "request_num_preemptions_count",
]  # fmt: skip
N, M = 5, 10


@pytest.fixture(scope="module")
def counted(tmp_path_factory):
    server = LiveServer(
        tmp_path_factory.mktemp("counted") / "var", environment={"DRAGOMAN_SPECULATIVE_TOKENS": "0"}
    ).start()
    for i in range(N):
        prompt = f"Number {i} and {i}"
        server.post("/v1/completions", {"prompt": prompt, "max_tokens": M, "ignore_eos": True, "temperature": 0})
    server.prompt_tokens = sum(
        server.post("/tokenize", {"prompt": f"Number {i} and {i}"}).json()["count"] for i in range(N)
    )
    yield server
    assert server.stop() == 0


@pytest.mark.parametrize("name", NAMES)
def test_the_family_is_there(counted, name):
    assert f"vllm:{name}" in counted.get("/metrics").text


def test_exact_counts(counted):
    def value(name):
        return counted.metric(f"vllm:{name}", engine="0")

    wait_until(lambda: value("iteration_tokens_total_count") == N * M, 60, lambda: counted.get("/metrics").text)
    assert value("time_to_first_token_seconds_count") == N
    assert value("inter_token_latency_seconds_count") == N * (M - 1)
    for name in ("e2e_request_latency", "request_queue_time", "request_inference_time", "request_prefill_time"):
        assert value(f"{name}_seconds_count") == N
    assert value("request_prompt_tokens_sum") == value("prompt_tokens_total") == counted.prompt_tokens
    assert value("request_generation_tokens_sum") == value("generation_tokens_total") == N * M
    assert value("request_params_max_tokens_sum") == N * M
    assert value("iteration_tokens_total_sum") == counted.prompt_tokens + N * M
    assert value("iteration_tokens_total_bucket") > 0
    assert counted.metric("vllm:request_success_total", finished_reason="length") == N


def test_tgis_batches(counted):
    steps = counted.metric("tgi_batch_inference_count", method="decode")
    assert counted.metric("tgi_batch_inference_success", method="decode") == steps > 0
    wait_until(lambda: counted.metric("tgi_batch_inference_duration_count", method="decode") >= steps)
    assert counted.metric("tgi_batch_inference_duration_sum", method="prefill") > 0


def test_adapters_in_slots(counted):
    counted.post("/v1/completions", {"model": "json", "prompt": "a", "max_tokens": 1})
    wait_until(lambda: 'running_lora_adapters="json"' in counted.get("/metrics").text)
