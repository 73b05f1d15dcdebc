"""GET /v1/models and /v1/models/{m}."""

from __future__ import annotations

import json

import pytest

from tests.dialects.mindie.conftest import golden


@pytest.mark.live
def test_the_list_is_indented(mindie):
    text = mindie.get("/v1/models").text
    listed = json.loads(text)
    assert text == json.dumps(listed, indent=4, sort_keys=True)
    assert listed["data"][0] == {
        "id": "demo", "object": "model", "owned_by": "MindIE Server", "parent": "null", "root": "demo"
    }  # fmt: skip
    assert {"json", "pirate"} <= {card["id"] for card in listed["data"] if card["parent"] == "demo"}


@pytest.mark.live
def test_one_model(mindie):
    golden(
        mindie.get("/v1/models/demo").content,
        '{"id":"demo","object":"model","created":<n>,"owned_by":"MindIE Server"}',
    )
    golden(
        mindie.get("/v1/models/json").content,
        '{"id":"json","object":"model","created":<n>,"owned_by":"MindIE Server","parent":"demo"}',
    )


def test_unknown_model(mindie):
    answer = mindie.get("/v1/models/x")
    assert (answer.status_code, answer.json()["error"]) == (404, "Model x not found.")
