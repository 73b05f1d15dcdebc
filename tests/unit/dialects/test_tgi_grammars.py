"""TGI's grammars, in its own field and as huggingface_hub's `response_format`: what the engine is asked to follow."""

from __future__ import annotations

import json

import pytest

from engine.failures import Failure, FailureCode
from inference.vendors.tgi_grammar import completed
from tests.unit.scripts import Script

TOWN = {"properties": {"city": {"type": "string"}, "size": {"type": "integer"}}, "required": ["city"]}
CLOSED = {**TOWN, "type": "object", "additionalProperties": False}
CHAT = {"messages": [{"role": "user", "content": "Hello"}]}
FORMS = [
    {"type": "json", "value": TOWN},
    {"type": "json", "value": json.dumps(TOWN)},
    {"type": "json_object", "value": TOWN},
    {"type": "json_schema", "value": {"name": "town", "strict": True, "schema": TOWN}},
]
REFUSED = [
    ({"type": "json", "value": {"type": "object"}}, "grammar is not valid: Grammar must have a 'properties' field"),
    ({"type": "json", "value": "{"}, "grammar is not valid: Input data was truncated"),
    ({"type": "json", "value": [TOWN]}, "grammar is not supported"),
    ({"type": "json_schema", "value": {"name": "town"}}, "grammar is not supported"),
    ({"type": "regex", "value": 5}, "grammar is not supported"),
    ({"type": "regex", "value": ""}, "grammar is not valid: a regular expression must be a non-empty string."),
    ({"type": "regex", "value": "a" * 65537},
     "grammar is not valid: at most 65536 characters are allowed, got 65537."),
]  # fmt: skip


def asked_of(worker) -> tuple[str, object]:
    """The last request's grammar, without its white space."""
    grammar = worker.submits[-1].params.grammar
    value = json.loads(grammar.text) if grammar.kind == "json_schema" else grammar.text
    if isinstance(value, dict):
        assert value.pop("x-guidance") == {"whitespace_pattern": " ?"}
    return grammar.kind, value


@pytest.mark.parametrize("form", FORMS, ids=str)
async def test_a_schema_is_a_closed_object(serving, form):
    for path, body in (
        ("/generate", {"inputs": "a", "parameters": {"grammar": form}}),
        ("/v1/chat/completions", {**CHAT, "response_format": form}),
        ("/v1/completions", {"prompt": "a", "response_format": form}),
    ):
        answer = await serving.post(path, body)
        assert answer.status == 200, answer.text
        assert asked_of(serving.worker) == ("json_schema", CLOSED)


async def test_a_regular_expression(serving):
    form = {"type": "regex", "value": "a+"}
    for path, body in (
        ("/generate", {"inputs": "a", "parameters": {"grammar": form}}),
        ("/v1/chat/completions", {**CHAT, "response_format": form}),
    ):
        assert (await serving.post(path, body)).status == 200
        assert asked_of(serving.worker) == ("regex", "a+")


@pytest.mark.parametrize(("form", "text"), REFUSED, ids=lambda value: str(value)[:40])
async def test_refused_in_the_routers_words(serving, form, text):
    native = await serving.post("/generate", {"inputs": "a", "parameters": {"grammar": form}})
    assert (native.status, native.json()) == (
        422,
        {"error": f"Input validation error: {text}", "error_type": "validation"},
    )
    chat = await serving.post("/v1/chat/completions", {**CHAT, "response_format": form})
    assert (chat.status, chat.json()["error"]["message"]) == (400, text)


async def test_a_grammar_that_does_not_compile_has_the_same_prefix(serving):
    serving.worker.default = Script(fail_after=0, failure=Failure(FailureCode.GRAMMAR, {"reason": "it is too large"}))
    grammar = {"type": "regex", "value": "a+"}
    answer = await serving.post("/generate", {"inputs": "a", "parameters": {"grammar": grammar}})
    assert answer.json()["error"] == "Input validation error: grammar is not valid: it is too large"


@pytest.mark.parametrize(("schema", "expected"), [
    ({"properties": {"properties": {"type": "string"}, "type": {"type": "integer"}}},
     {"properties": {"properties": {"type": "string"}, "type": {"type": "integer"}}, "type": "object",
      "additionalProperties": False}),
    ({"properties": {"a": {"type": "array", "items": TOWN}}},
     {"properties": {"a": {"type": "array", "items": CLOSED}}, "type": "object", "additionalProperties": False}),
    ({"$defs": {"t": TOWN}, "properties": {"a": {"$ref": "#/$defs/t"}, "b": {"anyOf": [TOWN, {"type": "null"}]}}},
     {"$defs": {"t": CLOSED}, "properties": {"a": {"$ref": "#/$defs/t"}, "b": {"anyOf": [CLOSED, {"type": "null"}]}},
      "type": "object", "additionalProperties": False}),
    ({"properties": {"a": {"const": {"properties": {}}}}, "additionalProperties": True},
     {"properties": {"a": {"const": {"properties": {}}}}, "type": "object", "additionalProperties": False}),
    ({"properties": {"a": True}, "allOf": [TOWN]}, {"properties": {"a": True}, "allOf": [TOWN], "type": "object"}),
])  # fmt: skip
def test_what_a_schema_means(schema, expected):
    assert completed(schema, "grammar") == expected
