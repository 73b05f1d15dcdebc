"""GET /v2/health/live and /v2/health/ready."""

from __future__ import annotations

import pytest


@pytest.mark.live
@pytest.mark.parametrize("path", ["/v2/health/live", "/v2/health/ready"])
def test_it_works(mindie, path):
    answer = mindie.manage(path)
    assert (answer.status_code, answer.content) == (200, b"")
    assert len(answer.headers["RequestUUID"]) == 32


@pytest.mark.parametrize("path", ["/v2/health/live", "/v2/health/ready"])
def test_other_planes_and_methods_have_no_such_row(mindie, path):
    for answer in (mindie.get(path), mindie.post(path, {}, management=True)):
        assert (answer.status_code, answer.content) == (404, b"")
