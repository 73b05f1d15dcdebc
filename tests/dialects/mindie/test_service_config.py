"""GET /v1/config."""

from __future__ import annotations

import pytest

from tests.dialects.mindie.conftest import golden


@pytest.mark.live
def test_golden(mindie):
    golden(
        mindie.manage("/v1/config").content,
        '{"modelName":"demo","maxSeqLen":2048,"npuMemSize":-1,"cpuMemSize":0,"worldSize":1,"maxOutputLen":2048,'
        '"cacheBlockSize":16}',
    )
