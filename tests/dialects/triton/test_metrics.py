"""Triton's metrics plane."""

from __future__ import annotations

import re

import pytest

from tests import calls
from tests.live import LiveServer, free_port

pytestmark = [pytest.mark.full, pytest.mark.live]


def test_metrics(tmp_path):
    port = free_port()
    server = LiveServer(tmp_path / "var", environment={"DRAGOMAN_TRITON_METRICS_PORT": str(port)}).start()
    for body in ({"text_input": "a", "max_tokens": 2}, {"text_input": "b", "max_tokens": 2}):
        assert server.post("/v2/models/demo/generate", body).status_code == 200
    answer = calls.get(f"http://127.0.0.1:{port}/metrics")
    assert answer.headers["content-type"] == "text/plain; charset=utf-8"
    found = dict(
        re.findall(r'^(nv_\w+)\{model="demo",(?:reason="OTHER",)?version="1"\} (\d+)$', answer.text, re.MULTILINE)
    )
    assert (found["nv_inference_request_success"], found["nv_inference_request_failure"]) == ("2", "0")
    assert (found["nv_inference_count"], found["nv_inference_exec_count"]) == ("2", "2")
    assert int(found["nv_inference_request_duration_us"]) >= int(found["nv_inference_compute_infer_duration_us"]) > 0
    assert re.search(r"^vllm:generation_tokens_total\{.*\} 4\.0$", answer.text, re.MULTILINE)
    assert calls.get(f"http://127.0.0.1:{port}/v2").status_code == 404
    assert server.stop() == 0
