"""GET /info."""

from __future__ import annotations

import pytest

from tests.dialects.mindie.conftest import golden


@pytest.mark.live
def test_golden(mindie):
    dtype = mindie.manage("/info").json()["models"][0]["model_dtype"]
    golden(
        mindie.manage("/info").content,
        '{"docker_label":null,"max_batch_total_tokens":1024,"max_best_of":1,"max_concurrent_requests":64,'
        '"max_stop_sequences":null,"max_waiting_tokens":null,"sha":null,"validation_workers":null,'
        '"version":"0.1.0","waiting_served_ratio":null,"models":[{"model_device_type":"npu","model_dtype":"'
        + dtype
        + '","model_id":"demo","model_pipeline_tag":"text-generation","model_sha":null,"max_total_tokens":2048}],'
        '"max_input_length":2047}',
    )
