"""The white space that JSON under a grammar may have: one blank, or a line break with what the schema's levels can
need.
"""

from __future__ import annotations

import json

import pytest

from inference.generation.structured import UNKNOWN_LEVELS, json_schema

A_NUMBER = {"type": "integer"}


def levels(schema):
    """The levels of indentation that the grammar allows."""
    pattern = json.loads(json_schema(schema, "f").grammar.text)["x-guidance"]["whitespace_pattern"]
    return next(n for n in range(UNKNOWN_LEVELS + 1) if pattern == rf"( |\n(\t{{0,{n}}}| {{0,{4 * n}}}))?")


@pytest.mark.parametrize(("schema", "deepest"), [
    (A_NUMBER, 0),
    ({"enum": [1, "x"]}, 0),
    ({"enum": [1, [2]]}, UNKNOWN_LEVELS),
    ({"const": "x"}, 0),
    ({"const": {"a": 1}}, UNKNOWN_LEVELS),
    ({"type": "object", "properties": {"a": A_NUMBER}, "additionalProperties": False}, 1),
    ({"type": "object", "properties": {"a": {"type": "array", "items": A_NUMBER}}}, 2),
    ({"type": "array", "items": {"enum": ["x"]}}, 1),
    ({"type": "array", "prefixItems": [A_NUMBER, {"type": "array", "items": A_NUMBER}]}, 2),
    ({"anyOf": [A_NUMBER, {"type": "array", "items": A_NUMBER}]}, 1),
    ({"type": "object"}, UNKNOWN_LEVELS),
    ({"type": "array"}, UNKNOWN_LEVELS),
    ({"$ref": "#/$defs/a", "$defs": {"a": A_NUMBER}}, UNKNOWN_LEVELS),
    ({}, UNKNOWN_LEVELS),
])  # fmt: skip
def test_indentation_is_as_deep_as_the_schema(schema, deepest):
    assert levels(schema) == deepest
