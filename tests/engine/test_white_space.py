"""The white space that JSON under a schema may have: as people and programs write it, and no more."""

from __future__ import annotations

import json
from typing import Any

import pytest
from llguidance import LLMatcher, LLTokenizer
from tokenizers import Tokenizer

from engine.grammar.source import source
from inference.generation import structured
from tests.conftest import DEMO

TEXT = (DEMO / "tokenizer.json").read_text()
TOKENIZER, CODES = LLTokenizer(TEXT, eos_token=2), Tokenizer.from_str(TEXT)

FLAT = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False}
DEEP = {"type": "object", "properties": {"a": {"type": "array", "items": {"type": "array", "items": FLAT}}}}
TREE = {"$ref": "#/$defs/t", "$defs": {"t": {"type": "object", "properties": {"t": {"$ref": "#/$defs/t"}}}}}
VALUES = [
    (FLAT, {"a": 1}),
    (DEEP, {"a": [[{"a": 1}, {"a": 2}]]}),
    (TREE, {"t": {"t": {}}}),
    ({"type": "object"}, {"x": [1, {"y": []}]}),
]


def accepts(schema: dict[str, Any], text: str) -> bool:
    """Whether the text can be said as a whole under the schema's grammar."""
    made = structured.json_schema(schema, "schema").grammar
    matcher = LLMatcher(TOKENIZER, source(made.kind, made.text))
    ids = CODES.encode(text, add_special_tokens=False).ids
    return matcher.validate_tokens(ids) == len(ids)


@pytest.mark.parametrize(("schema", "value"), VALUES)
@pytest.mark.parametrize("written", [
    {"separators": (",", ":")}, {}, {"indent": 2}, {"indent": 4}, {"indent": "\t"},
    {"indent": 2, "separators": (",", ":")},
])  # fmt: skip
def test_usual_forms(schema, value, written):
    assert accepts(schema, json.dumps(value, **written))


@pytest.mark.parametrize("text", ['{  "a": 1}', '{\n\n"a": 1}', '{"a":  1}', '{"a":\t1}', '{\n     "a": 1}',
                                  '{\r\n"a": 1}', '{ \n"a": 1}', '{"a": 1  }', '{\n\t\t"a": 1}'])  # fmt: skip
def test_nothing_beyond_a_blank_or_a_line_with_its_indentation(text):
    assert not accepts(FLAT, text)


def test_indentation_grows_with_the_levels_of_the_schema():
    assert accepts(DEEP, '{"a":\n' + " " * 16 + "[]}")
    assert not accepts(DEEP, '{"a":\n' + " " * 17 + "[]}")
    assert accepts({"type": "object"}, '{"a":\n' + " " * 32 + "[]}")
    assert not accepts({"type": "object"}, '{"a":\n' + " " * 33 + "[]}")


def test_a_clients_own_white_space():
    made = structured.json_schema(FLAT, "schema", "").grammar
    matcher = LLMatcher(TOKENIZER, source(made.kind, made.text))
    ids = CODES.encode('{"a": 1}', add_special_tokens=False).ids
    assert matcher.validate_tokens(ids) < len(ids)
