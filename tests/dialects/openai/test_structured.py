"""Structured output over HTTP, in every form that the dialects have for it."""

from __future__ import annotations

import json
import re

import pytest

SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 12}, "size": {"enum": ["big", "small"]}},
    "required": ["city", "size"],
    "additionalProperties": False,
}
CHAT = {"messages": [{"role": "user", "content": "Tell me of a town."}], "max_tokens": 400, "temperature": 0}


def is_town(text: str) -> bool:
    value = json.loads(text)
    return set(value) == {"city", "size"} and value["size"] in ("big", "small")


@pytest.mark.live
@pytest.mark.parametrize(
    "fields",
    [
        {"response_format": {"type": "json_schema", "json_schema": {"name": "town", "schema": SCHEMA, "strict": True}}},
        {"structured_outputs": {"json": SCHEMA}},
        {"structured_outputs": {"json": json.dumps(SCHEMA), "disable_any_whitespace": True}},
        {"guided_json": SCHEMA},
    ],
)
def test_chat_by_schema(server, fields):
    for temperature in (0, 1.5):
        body = {**CHAT, **fields, "temperature": temperature, "seed": 3}
        choice = server.post("/v1/chat/completions", body).json()["choices"][0]
        assert choice["finish_reason"] == "stop"
        assert is_town(choice["message"]["content"])


@pytest.mark.live
def test_objects_may_be_closed(server):
    schema = {"type": "object", "properties": {"a": {"type": "object", "properties": {"b": {"type": "boolean"}}}}}
    fields = {"structured_outputs": {"json": schema, "disable_additional_properties": True}}
    for seed in range(3):
        body = {**CHAT, **fields, "temperature": 1.5, "seed": seed}
        value = json.loads(server.post("/v1/chat/completions", body).json()["choices"][0]["message"]["content"])
        assert set(value) <= {"a"}
        assert set(value.get("a", {})) <= {"b"}


TAGS = {"structures": [{"begin": "<n>", "schema": {"enum": [7]}, "end": "</n>"}], "triggers": ["<n"]}


@pytest.mark.live
@pytest.mark.parametrize(
    "fields",
    [
        {"response_format": {"type": "structural_tag", **TAGS}},
        {"structured_outputs": {"structural_tag": json.dumps(TAGS)}},
    ],
)
def test_tags_in_free_text(server, fields):
    plain = server.post("/v1/chat/completions", CHAT).json()["choices"][0]["message"]["content"]
    answer = server.post("/v1/chat/completions", {**CHAT, **fields}).json()["choices"][0]["message"]["content"]
    assert answer == plain, "the model says nothing that begins a tag"


@pytest.mark.parametrize(
    "value",
    [5, "{", {}, {**TAGS, "triggers": ["<m"]}, {**TAGS, "structures": [{"begin": "<n>"}]}, {**TAGS, "triggers": [1]}],
)
def test_bad_tags_are_named(server, value):
    refused = server.post("/v1/chat/completions", {**CHAT, "structured_outputs": {"structural_tag": value}})
    assert refused.status_code == 400
    assert "structured_outputs" in refused.json()["error"]["message"]


def test_a_deeply_nested_schema_is_refused(server):
    schema = '{"properties": {"a": ' * 400 + "{}" + "}}" * 400
    fields = {"structured_outputs": {"json": schema, "disable_additional_properties": True}}
    assert server.post("/v1/chat/completions", {**CHAT, **fields}).status_code == 400


@pytest.mark.live
def test_json_object(server):
    body = {**CHAT, "response_format": {"type": "json_object"}, "max_tokens": 60}
    choice = server.post("/v1/chat/completions", body).json()["choices"][0]
    assert choice["message"]["content"].startswith("{")
    if choice["finish_reason"] == "stop":
        assert isinstance(json.loads(choice["message"]["content"]), dict)


@pytest.mark.live
@pytest.mark.parametrize(
    ("fields", "pattern"),
    [
        ({"structured_outputs": {"regex": r"\d{3}-[xyz]+!"}}, r"\d{3}-[xyz]+!"),
        ({"guided_regex": "(ab)+c"}, "(ab)+c"),
        ({"structured_outputs": {"choice": ["north", "south"]}}, "north|south"),
        ({"guided_choice": ["one", "two"]}, "one|two"),
        ({"structured_outputs": {"grammar": 'root ::= "a" [0-9] "z"'}}, "a[0-9]z"),
        ({"guided_grammar": 'start: "x" /[0-9]/ "y"'}, "x[0-9]y"),
        ({"guided_grammar": 'start: "old"', "structured_outputs": {"grammar": 'start: "new"'}}, "new"),
    ],
)
def test_completions_by_other_grammars(server, fields, pattern):
    body = {"prompt": "Once", "max_tokens": 200, "temperature": 1.2, "seed": 1, "n": 2, **fields}
    for choice in server.post("/v1/completions", body).json()["choices"]:
        assert choice["finish_reason"] == "stop"
        assert re.fullmatch(pattern, choice["text"])


@pytest.mark.live
@pytest.mark.parametrize(
    "grammar",
    [
        {"type": "json", "value": SCHEMA},
        {"type": "json_object", "value": json.dumps(SCHEMA)},
        {"type": "json_schema", "value": {"schema": SCHEMA, "name": "town"}},
    ],
)
def test_tgi_by_schema(server, grammar):
    body = {"inputs": "A town:", "parameters": {"grammar": grammar, "max_new_tokens": 120, "details": True}}
    answer = server.post("/generate", body).json()
    assert is_town(answer["generated_text"])
    assert answer["details"]["finish_reason"] == "eos_token"


@pytest.mark.live
def test_tgi_by_regex(server):
    body = {"inputs": "A number:", "parameters": {"grammar": {"type": "regex", "value": r"\d{2}\.\d"}}}
    assert re.fullmatch(r"\d{2}\.\d", server.post("/generate", body).json()["generated_text"])


@pytest.mark.parametrize(
    ("grammar", "text"),
    [
        ({"type": "json", "value": 3}, "grammar is not supported"),
        ({"type": "json", "value": "{"}, "grammar is not valid"),
        ({"type": "json", "value": "[" * 50_000}, "grammar is not valid"),
        ({"type": "json", "value": {"type": "object"}}, "Grammar must have a 'properties' field"),
        pytest.param({"type": "regex", "value": "["}, "regex", marks=pytest.mark.live),
    ],
)
def test_tgi_refuses_bad_grammars(server, grammar, text):
    response = server.post("/generate", {"inputs": "x", "parameters": {"grammar": grammar}})
    assert response.status_code == 422
    assert text in response.json()["error"]


@pytest.mark.live
def test_a_bad_grammar_is_refused_before_a_stream_begins(server):
    response = server.post("/v1/chat/completions", {**CHAT, "stream": True, "guided_regex": "["})
    assert response.status_code == 400
    assert "guided_regex" in response.json()["error"]["message"]
