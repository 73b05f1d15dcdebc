"""GET /health."""

from __future__ import annotations

import pytest


@pytest.mark.live
def test_it_works(mindie):
    answer = mindie.manage("/health")
    assert (answer.status_code, answer.content) == (200, b"")
