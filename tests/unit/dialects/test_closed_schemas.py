"""Objects whose schemas list their properties get no others, whatever field the schema comes in, unless it says so."""

from __future__ import annotations

import json

import pytest

from tests.unit.scripts import says

OPEN = {
    "type": "object",
    "properties": {"a": {"type": "object", "properties": {"b": {"type": "boolean"}}}, "free": {"type": "object"}},
}
LOOSE = {**OPEN, "additionalProperties": {"type": "integer"}}


@pytest.mark.parametrize("asked", [
    lambda schema: {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": schema}}},
    lambda schema: {"structured_outputs": {"json": schema}},
    lambda schema: {"structured_outputs": {"json": json.dumps(schema)}},
    lambda schema: {"guided_json": schema},
])  # fmt: skip
async def test_the_grammar_has_closed_objects(start, asked):
    serving = await start()
    for schema in (OPEN, LOOSE):
        serving.worker.scripts.append(says('{"a": {}}'))
        body = {"messages": [{"role": "user", "content": "Hi"}], **asked(schema)}
        assert (await serving.post("/v1/chat/completions", body)).status == 200
    closed, loose = (json.loads(submit.params.grammar.text) for submit in serving.worker.submits)
    assert (closed["additionalProperties"], closed["properties"]["a"]["additionalProperties"]) == (False, False)
    assert "additionalProperties" not in closed["properties"]["free"]
    assert loose["additionalProperties"] == {"type": "integer"}
