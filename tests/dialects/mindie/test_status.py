"""GET /v1/status and /v2/status."""

from __future__ import annotations

import pytest

from tests.dialects.mindie.conftest import golden

RESOURCE = (
    '"availSlotsNum":64,"availBlockNum":<n>,"waitingRequestNum":0,"runningRequestNum":0,"swappedRequestNum":0,'
    '"freeNpuBlockNums":<n>,"freeCpuBlockNums":0,"totalNpuBlockNums":<n>,"totalCpuBlockNums":0'
)
SERVICE = '{"service":{"roleStatus":"RoleReady","currentRole":"none"},"resource":{'


@pytest.mark.live
def test_golden(mindie):
    mindie.server.wait_idle()
    golden(mindie.manage("/v1/status").content, SERVICE + RESOURCE + '},"linkStatus":{"peers":[]}}')


@pytest.mark.live
def test_golden_of_version_2(mindie):
    mindie.server.wait_idle()
    more = ',"totalAvailNpuSlotsNum":64,"totalAvailNpuBlockNum":<n>,"dpInstMap":[[0,<n>]],"maxAvailNpuBlockNum":<n>'
    golden(mindie.manage("/v2/status").content, SERVICE + RESOURCE + more + '},"linkStatus":{"peers":[]}}')
