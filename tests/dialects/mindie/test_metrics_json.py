"""GET /metrics-json."""

from __future__ import annotations

import pytest

from tests.dialects.mindie.conftest import golden


@pytest.mark.live
def test_golden(mindie):
    mindie.post("/infer", {"inputs": "Hello", "parameters": {"max_new_tokens": 4}})
    mindie.server.wait_idle()
    instance = mindie.server.management_url.removeprefix("http://")
    rows = ",".join(
        f'{{"metric":[{{"__name__":"{name}","job":"node","instance":"{instance}"}}],"value":"<n>"}}'
        for name in ("TTFT", "TBT", "waitingInferRequestNum", "processingInferRequestNum", "remainBlocks")
    )
    golden(mindie.manage("/metrics-json").content, f'{{"resultType":"vector","result":[{rows}]}}')
