"""GET /v2/models/{m}/getSlotCount."""

from __future__ import annotations

import pytest

from tests.dialects.mindie.conftest import golden
from tests.live import wait_until


@pytest.mark.live
def test_golden(mindie):
    mindie.server.wait_idle()
    answer = mindie.manage("/v2/models/demo/getSlotCount")
    golden(answer.content, '{"total_slots":64,"free_slots":64,"available_tokens_length":<n>}')
    assert answer.json()["available_tokens_length"] > 2048


@pytest.mark.live
def test_a_running_request_takes_a_slot(mindie):
    body = {"prompt": "Once", "max_tokens": 1900, "ignore_eos": True, "stream": True, "temperature": 2.0}
    with mindie.server.raw("/v1/completions", body):
        wait_until(lambda: mindie.manage("/v2/models/demo/getSlotCount").json()["free_slots"] == 63)
    mindie.server.wait_idle()


def test_unknown_model(mindie):
    assert mindie.manage("/v2/models/x/getSlotCount").json()["error"] == "Model x not found."
