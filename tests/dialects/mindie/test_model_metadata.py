"""GET /v2/models/{m}[/versions/{v}] and .../config."""

from __future__ import annotations

import pytest


@pytest.mark.live
@pytest.mark.parametrize("path", ["/v2/models/demo", "/v2/models/demo/versions/7"])
def test_golden(mindie, path):
    assert mindie.get(path).content == (
        b'{"name":"demo","platform":"MindIE Server","inputs":[{"name":"input0","shape":[-1],"datatype":"UINT32"}],'
        b'"outputs":[{"name":"output0","shape":[-1],"datatype":"UINT32"}]}'
    )


@pytest.mark.live
def test_golden_config(mindie):
    assert mindie.get("/v2/models/demo/config").content == (
        b'{"model_name":"demo","input_datatype":"INT64","output_datatype":"INT64","max_seq_len":2048,"npu_mem_size":-1,'
        b'"cpu_mem_size":0,"world_size":1,"model_weight_path":"demo","model_instance_type":"Standard"}'
    )


@pytest.mark.parametrize("path", ["/v2/models/x", "/v2/models/x/config"])
def test_unknown_model(mindie, path):
    answer = mindie.get(path)
    assert (answer.status_code, answer.json()["error"]) == (404, "Model x not found.")
