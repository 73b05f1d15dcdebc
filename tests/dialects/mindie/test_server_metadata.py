"""GET /v2."""

from __future__ import annotations

import pytest


@pytest.mark.live
def test_golden(mindie):
    assert mindie.get("/v2").content == (
        b'{"name":"MindIE Server","version":"1.0.0","extensions":{"max_iter_times":2048,"prefill_policy_type":0,'
        b'"decode_policy_type":0,"max_prefill_batch_size":64,"max_prefill_tokens":1024}}'
    )
