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


A, B = {"properties": {"a": {"type": "integer"}}}, {"properties": {"b": {"type": "integer"}}}


@pytest.mark.parametrize(("schema", "is_open"), [
    ({"type": "object", **A}, []),
    ({"type": "object", "allOf": [A, B]}, ["", "allOf.0", "allOf.1"]),
    ({"type": "object", "if": A, "then": B}, ["", "if", "then"]),
    ({"allOf": [A], "anyOf": [B, A]}, ["", "allOf.0", "anyOf.0", "anyOf.1"]),
    ({**A, "anyOf": [B, A]}, ["", "anyOf.0", "anyOf.1"]),
    ({"anyOf": [B, A]}, [""]),
    ({**A, "patternProperties": {"^x": {"type": "integer"}}}, [""]),
    ({**A, "$ref": "#/$defs/b", "$defs": {"b": B}}, ["", "$defs.b"]),
])  # fmt: skip
async def test_objects_that_must_fit_several_schemas_stay_open(start, schema, is_open):
    """Each of the schemas names some of the properties."""
    serving = await start()
    wanted = {"json": schema, "disable_additional_properties": True}
    body = {"messages": [{"role": "user", "content": "Hi"}], "structured_outputs": wanted}
    assert (await serving.post("/v1/chat/completions", body)).status == 200
    closed = json.loads(serving.worker.submits[0].params.grammar.text)
    assert [path for path, each in objects(closed) if "additionalProperties" not in each] == is_open


def objects(schema, path=""):
    """Every schema of an object, or that has further ones, by its path."""
    if not isinstance(schema, dict):
        return
    if not {"properties", "allOf", "anyOf", "if", "$ref"}.isdisjoint(schema):
        yield path, schema
    for name, each in schema.items():
        below = f"{path}.{name}".removeprefix(".")
        if name in ("allOf", "anyOf"):
            for i, one in enumerate(each):
                yield from objects(one, f"{below}.{i}")
        elif name in ("if", "then"):
            yield from objects(each, below)
        elif name == "$defs":
            for key, one in each.items():
                yield from objects(one, f"{below}.{key}")
