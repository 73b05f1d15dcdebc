"""GET /v2/models/{m}[/versions/{v}]/ready."""

from __future__ import annotations

import pytest


@pytest.mark.live
@pytest.mark.parametrize("path", ["/v2/models/demo/ready", "/v2/models/demo/versions/1/ready"])
def test_it_works(mindie, path):
    answer = mindie.manage(path)
    assert (answer.status_code, answer.content) == (200, b"")


def test_unknown_model(mindie):
    answer = mindie.manage("/v2/models/none/ready")
    assert answer.status_code == 404
    assert answer.content == b'{"error":"Model none not found.","error_type":"NotFoundError"}'


@pytest.mark.parametrize("name", ["a b", "a%2Fb", "ä"])
def test_names_that_no_model_can_have_are_no_route(mindie, name):
    answer = mindie.manage(f"/v2/models/{name}/ready")
    assert answer.status_code == 404
